"""Where the name of a model leads, if it is that of a folder. No name ends in an error here."""

import os
from pathlib import Path


def path_of(name: str) -> Path:
    """The name as a path; `~` is a home folder, where there is such a user."""
    return Path(os.path.expanduser(name))


def is_folder(name: str) -> bool:
    """Whether a folder of this name can be seen; what is too long for a name is none."""
    try:
        return path_of(name).is_dir()
    except (OSError, ValueError):
        return False
