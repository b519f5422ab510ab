"""Where the name of a model leads, if it is that of a folder; whether a file can be written.

No name ends in an error that is not ours.
"""

import os
from pathlib import Path

from proto.errors import ConfigurationError
from proto.system_errors import cannot_write


def path_of(name: str) -> Path:
    """The name as a path; `~` is a home folder, where there is such a user."""
    return Path(os.path.expanduser(name))


def is_folder(name: str) -> bool:
    """Whether a folder of this name can be seen; what is too long for a name is none."""
    try:
        return path_of(name).is_dir()
    except (OSError, ValueError):
        return False


def check_writable(path: Path, flag: str) -> None:
    """Raises ConfigurationError if there is no writing to this file, which is left as it was.

    flag  by which it was given, such as --trace
    """
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"{flag}: {path} cannot be written: {cannot_write(error)}"
        ) from error
