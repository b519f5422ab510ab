"""Reads and writes the files of `measure`."""

from contextlib import suppress
from pathlib import Path

from lab.pair.record import Measured, is_complete
from lab.records import from_json
from proto.errors import ConfigurationError, OutputError
from proto.system import cannot_read, cannot_write


def read(path: Path, flag: str) -> Measured:
    """Return what a file holds. Raises ConfigurationError, which names the flag."""
    try:
        found = from_json(Measured, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{flag}: {path} cannot be read: {cannot_read(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{flag}: {path} is no text; `measure` makes such a file"
        ) from error
    except ValueError as error:
        raise _not_ours(path, flag) from error
    if not is_complete(found):
        raise _not_ours(path, flag)
    return found


def _not_ours(path: Path, flag: str) -> ConfigurationError:
    return ConfigurationError(
        f"{flag}: {path} was not made by this release's `measure`; make it again"
    )


def write(path: Path, text: str) -> None:
    """Write a file as a whole; on an error it stays as it was. Raises OutputError."""
    is_device = path.exists() and not path.is_file()
    partial = path if is_device else path.with_name(f".{path.name}.new")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        if not is_device:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        raise OutputError(f"{path} cannot be written: {cannot_write(error)}") from error
