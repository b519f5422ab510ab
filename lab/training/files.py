"""Writes files of a training run whole or not at all: under another name, which is then changed.

A process that is killed at any moment leaves the old file or the new one. Knows no head.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from proto.errors import OutputError
from proto.system import cannot_write

OS_ERROR = re.compile(r"os error (\d+)")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors on the CPU as a safetensors file. Raises OutputError."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}

    def write(partial: Path) -> None:
        save_file(whole, partial, metadata={"format": "pt", **(metadata or {})})
        partial.chmod(0o644)

    try:
        replace(path, write)
    except (OSError, SafetensorError) as error:
        raise _failed(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8. Raises OutputError."""
    try:
        replace(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise _failed(path, error) from error


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside `path` and rename it; on an error, remove it."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        write(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _failed(path: Path, error: Exception) -> OutputError:
    """Return the exception for a file that could not be written, with what to do about it."""
    why = " ".join(str(error).split())
    number = error.errno if isinstance(error, OSError) else None
    if found := OS_ERROR.search(why):  # safetensors gives the number in its text alone
        number = int(found[1])
    if number:
        why = cannot_write(OSError(number, os.strerror(number)))
    return OutputError(f"cannot write {path}: {why}; then the same command goes on")
