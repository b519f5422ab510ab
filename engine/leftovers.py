"""Temporary folders that have to go where a process ends at once, past Python's own tidying up.

Imports nothing that takes time: whoever ends a process so loads it before all else.
"""

import os

_folders: "set[str]" = set()


def keep_track_of(folder: str) -> None:
    """From now on `remove` removes this folder, which has files and no folders in it."""
    _folders.add(folder)


def forget(folder: str) -> None:
    """It has been removed."""
    _folders.discard(folder)


def remove() -> None:
    """Remove all of them, from a handler of a signal or any thread. Never raises."""
    for folder in tuple(_folders):
        try:
            for file in os.scandir(folder):
                os.unlink(file.path)
            os.rmdir(folder)
        except OSError:
            pass
