"""Temporary folders to remove when a process ends at once, without Python's own clean-up.

Imports nothing slow, because the code that ends a process loads this module before all else.
"""

import os

_folders: "set[str]" = set()


def keep_track_of(folder: str) -> None:
    """Register a folder for `remove` to delete; it must hold only files, no folders."""
    _folders.add(folder)


def forget(folder: str) -> None:
    """Take a folder off the list for `remove`, for it has been deleted."""
    _folders.discard(folder)


def remove() -> None:
    """Delete all registered folders; callable from a signal handler or any thread; never raises."""
    for folder in tuple(_folders):
        try:
            for file in os.scandir(folder):
                os.unlink(file.path)
            os.rmdir(folder)
        except OSError:
            pass
