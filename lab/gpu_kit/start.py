"""Runs the kit on a bare machine: it needs a Python 3.11 or 3.12, a torch, and no network.

    python3 lab/gpu_kit/start.py [--script NAME]... [--small] [--torch FOLDER] [--help]

It makes a virtual environment beside the models that also sees the packages of the running Python
(torch among them), installs the wheels that `make gpu-kit` has brought, and runs `lab.gpu_kit` in
it with all other options. This file imports only the standard library, because nothing else is
installed yet.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL_LIMIT_S, CHECK_LIMIT_S = 300, 120
# All packages that the measurements import; each must be importable in the new environment.
NEEDED = (
    *("torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub"),
    *("zmq", "msgpack", "pydantic", "typer", "rich", "jinja2", "pytest", "hypothesis"),
)
CHECK = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(f"{name} cannot be imported: {error}")
import torch
print(f"Python {sys.version.split()[0]}, torch {torch.__version__} of {torch.__path__[0]}, "
      f"CUDA of torch {torch.version.cuda}, GPU seen: {torch.cuda.is_available()}")
"""


class Problem(Exception):
    """An error with a message of one line that says what to do."""


def option(arguments: list[str], name: str, default: str) -> str:
    """Return the value of an option, given as --name VALUE or --name=VALUE, or the default."""
    for index, text in enumerate(arguments):
        if text == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if text.startswith(f"{name}="):
            return text.partition("=")[2]
    return default


def without(arguments: list[str], name: str) -> list[str]:
    """Return the arguments without this option and its value."""
    kept: list[str] = []
    skip = False
    for text in arguments:
        if not skip and text != name and not text.startswith(f"{name}="):
            kept.append(text)
        skip = not skip and text == name
    return kept


def environment_of(kit: Path, work: Path, others: list[str]) -> Path:
    """Make an environment with all needed packages, if new; return its Python. Raises Problem.

    others  folders of packages that it also searches, after its own; torch is in one of them
    """
    requirements, wheels = kit / "requirements.txt", kit / "wheels.tar.xz"
    if not requirements.exists():
        raise Problem(f"{kit} is no kit; run `make gpu-kit` where there is a network, and bring it")
    said = requirements.read_text() + "\n".join([sys.version, sys.executable, *others])
    digest = hashlib.sha256(said.encode()).hexdigest()[:12]
    folder = work / f"python-{digest}"
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return python
    print(f"making {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    # Without pip: some systems have no ensurepip.
    venv.EnvBuilder(system_site_packages=True, with_pip=False, symlinks=True).create(folder)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "lib" / version / "site-packages"
    # An image may keep torch in a virtual environment, whose packages a new one does not see.
    lines = [f"import site; site.addsitedir({other!r})" for other in others]
    (packages / "behind.pth").write_text("\n".join(lines) + "\n")
    _install(python, requirements, unpacked(wheels, folder / "wheels"))
    ready.touch()
    return python


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack the archive of wheels into a folder, and return the folder. Raises Problem."""
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise Problem(f"{archive} cannot be unpacked ({error}); make the kit again") from error
    return folder


def _install(python: Path, requirements: Path, wheels: Path) -> None:
    """Install the requirements from the folder of wheels. Raises Problem."""
    pips = sorted(wheels.glob("pip-*.whl"))
    if not pips:
        raise Problem(f"{wheels} has no pip; make the kit again")
    command = [str(python), str(pips[-1] / "pip"), "--isolated", "install", "--quiet"]
    command += ["--no-index", "--no-deps", "--ignore-installed", "--no-warn-script-location"]
    command += ["--no-compile", "--disable-pip-version-check", "--find-links", str(wheels)]
    command += ["-r", str(requirements)]
    _said(command, INSTALL_LIMIT_S, "the wheels cannot be installed")


def _said(command: list[str], limit_s: int, what: str) -> str:
    """Run a command and return its standard output. Raises Problem that begins with `what`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Problem(f"{what}: it took more than {limit_s} s") from error
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["no reason was given"]
        wrong = [line for line in lines if line.startswith("ERROR")] or lines
        raise Problem(f"{what}: {wrong[-1]}")
    return ended.stdout.strip()


def own_packages() -> list[str]:
    """Return the folders in which the running Python looks for installed packages."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def main() -> int:
    """Make the environment and replace this process by the kit; return a status only on failure."""
    arguments = sys.argv[1:]
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        print("Python 3.11 or 3.12 is needed: python3.12 lab/gpu_kit/start.py", file=sys.stderr)
        return 2
    kit = Path(option(arguments, "--kit", str(ROOT / "gpu-kit"))).absolute()
    default = Path(tempfile.gettempdir()) / "slipstream-gpu-kit"
    work = Path(option(arguments, "--work", str(default))).absolute()
    torch = option(arguments, "--torch", "")
    others = [str(Path(torch).absolute())] if torch else own_packages()
    try:
        work.mkdir(parents=True, exist_ok=True)
        python = environment_of(kit, work, others)
        what = "this environment is not complete (torch and numpy are the machine's: --torch)"
        print(_said([str(python), "-c", CHECK, *NEEDED], CHECK_LIMIT_S, what), flush=True)
    except (Problem, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    os.environ.pop("PYTHONPATH", None)
    os.chdir(ROOT)
    rest = without(arguments, "--torch")
    return os.execv(python, [str(python), "-m", "lab.gpu_kit", *rest])


if __name__ == "__main__":
    sys.exit(main())
