"""Builds llama.cpp's own programs once, for the benchmark's rows of llama.cpp.

    python -m lab.experiments.peers.build_llamacpp [--sources FOLDER]

The sources are those in the source distribution of llama-cpp-python, which pip downloads (77 MB).
The programs are put into our cache (~/.cache/slipstream/llama.cpp/bin), where the peer finds them.
This takes about three minutes on two cores, and needs cmake, ninja or make, and a C++ compiler.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from lab.experiments.peers import llamacpp_programs as programs
from lab.experiments.peers.gguf_file import llama_cpp_folder
from lab.help import Paragraphs

VERSION = "0.3.36"  # of llama-cpp-python; the forms of the programs' lines are those of this one
SOURCES = "vendor/llama.cpp"  # inside its source distribution
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DBUILD_SHARED_LIBS=ON",
    # The programs look for their libraries beside themselves, wherever both are copied.
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
)
LIMIT_S = 3600.0  # most seconds for one step
LAST_LINES = 12  # of a failed step, which are shown


class BuildError(Exception):
    """A step failed; the message is one line that says what to do."""


def what_is_missing() -> str:
    """Return which tools this machine lacks for the build, in one line; "" if all are there."""
    lacks = [] if shutil.which("cmake") else ["cmake"]
    if not shutil.which("ninja") and not shutil.which("make"):
        lacks.append("ninja or make")
    if not shutil.which("c++") and not shutil.which("g++") and not shutil.which("clang++"):
        lacks.append("a C++ compiler")
    return f"llama.cpp is built with {', '.join(lacks)}: install that first" if lacks else ""


def download(folder: Path) -> Path:
    """Download and unpack the source distribution; return llama.cpp's sources in `folder`.

    Raises BuildError.
    """
    package = "llama-cpp-python"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", package]
    _run("download", [*command, "--dest", str(folder), f"{package}=={VERSION}"])
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return next(folder.glob(f"*/{SOURCES}"))


def build(sources: Path, folder: Path) -> Path:
    """Build the programs in `folder`; return the folder with them and their libraries.

    Raises BuildError.
    """
    kind = "Ninja" if shutil.which("ninja") else "Unix Makefiles"
    _run("configure", ["cmake", "-S", str(sources), "-B", str(folder), "-G", kind, *OPTIONS])
    cores = str(len(os.sched_getaffinity(0)))  # make would start all compilers at once
    command = ["cmake", "--build", str(folder), "--parallel", cores]
    _run("compile", [*command, "--target", *programs.PROGRAMS])
    return folder / "bin"


def install(made: Path) -> Path:
    """Copy the built programs and libraries into our cache, and check that they start.

    Raises BuildError.
    """
    if lacks := [name for name in programs.PROGRAMS if not (made / name).is_file()]:
        raise BuildError(f"the build has made no {lacks[0]}")
    home = llama_cpp_folder()
    home.mkdir(parents=True, exist_ok=True)
    final = home / "bin"
    with tempfile.TemporaryDirectory(dir=home) as folder:
        shutil.copytree(made, Path(folder) / "bin", symlinks=True)
        if final.exists():
            final.rename(Path(folder) / "old")
        (Path(folder) / "bin").rename(final)
    for name in (programs.COMPLETION, programs.SPECULATIVE):
        try:
            programs.run(name, "--version")
        except programs.ProgramError as error:
            shutil.rmtree(final)
            raise BuildError(f"what was built does not run: {error}") from error
    return final


def _run(step: str, command: list[str]) -> None:
    """Run one step to its end; if it fails, show its last lines. Raises BuildError."""
    print(f"{step}: {' '.join(command)}", flush=True)
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"to {step} llama.cpp took more than {LIMIT_S:.0f} s") from error
    if ended.returncode:
        print("\n".join(ended.stdout.splitlines()[-LAST_LINES:]))
        raise BuildError(f"cannot {step} llama.cpp; the lines above say why")


def main() -> int:
    """Build and install; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.peers.build_llamacpp",
        description=__doc__,
        formatter_class=Paragraphs,
    )
    parser.add_argument("--sources", type=Path, help="llama.cpp's sources; default: downloaded")
    given = parser.parse_args().sources
    try:
        if lacks := what_is_missing():
            raise BuildError(lacks)
        if given is not None and not (given / "CMakeLists.txt").is_file():
            raise BuildError(f"--sources: there is no CMakeLists.txt in {given}")
        home = llama_cpp_folder()
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:
            sources = given or download(Path(folder))
            final = install(build(sources, Path(folder) / "build"))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{final}: {', '.join(programs.PROGRAMS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
