"""Folders and processes to remove when a process ends at once, without Python's own clean-up.

Imports nothing slow, because the code that ends a process loads this module before all else.
"""

import contextlib
import os
import signal

_folders: "set[str]" = set()
_processes: "set[int]" = set()


def keep_track_of(folder: str) -> None:
    """Register a folder for `remove` to delete; it must hold only files, no folders."""
    _folders.add(folder)


def forget(folder: str) -> None:
    """Take a folder off the list for `remove`, for it has been deleted."""
    _folders.discard(folder)


def remove() -> None:
    """Delete all registered folders; callable from a signal handler or any thread; never raises."""
    for folder in tuple(_folders):
        with contextlib.suppress(OSError):
            for file in os.scandir(folder):
                os.unlink(file.path)
            os.rmdir(folder)


def keep_track_of_process(pid: int) -> None:
    """Register a child process for `end_processes` to kill; it must not have been waited for."""
    _processes.add(pid)


def forget_process(pid: int) -> None:
    """Take a process off the list for `end_processes`, before it is waited for."""
    _processes.discard(pid)


def end_processes() -> None:
    """Kill all registered processes; callable from any thread; never raises.

    A child that ends as soon as this process is gone need not be killed, unless it is stopped.
    """
    for pid in tuple(_processes):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
