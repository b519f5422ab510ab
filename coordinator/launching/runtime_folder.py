"""Makes the folder of one coordinator's sockets and removes those of coordinators that died.

The owner of a folder holds a lock on the file `owner` in it. The kernel releases the lock when the
owner ends, however it ends. A process that gets the lock of another owner's folder may remove that
folder. The file appears in the folder only when it is locked, so a folder that is just being made
is never taken for one whose owner is dead.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path

PREFIX = "slipstream-"
OWNER = "owner"


class RuntimeFolder:
    """A temporary folder of mode 0700, so only this user can reach its socket. Raises OSError.

    It is removed by `remove`, when this object is collected, or when this process ends. The next
    RuntimeFolder removes what killed processes have left behind.
    """

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            self._lock = locked(self.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self.remove = weakref.finalize(self, _remove, self.path, self._lock)
        _folders.add(self)

    def disown(self) -> None:
        """In a forked child: leave the folder to the parent and release its lock."""
        if self.remove.detach() is not None:
            os.close(self._lock)


_folders: weakref.WeakSet[RuntimeFolder] = weakref.WeakSet()


def _disown_all() -> None:
    for folder in _folders:
        folder.disown()


os.register_at_fork(after_in_child=_disown_all)


def locked(folder: Path) -> int:
    """Create the file `owner`, lock it, and return its file descriptor. Raises OSError.

    The file gets its name only after it is locked. Where the file system has no locks it never gets
    the name, and no other process removes the folder.
    """
    unnamed = folder / f"{OWNER}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(folder / OWNER)
    return lock


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def sweep(place: Path) -> None:
    """Remove the runtime folders in `place` of this user whose owner process is dead."""
    for folder in place.glob(f"{PREFIX}*"):
        # A folder that is gone, in use, another user's or not one of ours is left as it is.
        with contextlib.suppress(OSError):
            remove_if_dead(folder)


def is_own(folder: Path) -> bool:
    """True if `folder` is a folder of this user. Raises OSError."""
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()


def remove_if_dead(folder: Path) -> None:
    """Remove a folder of this user if its owner is dead. Raises OSError: it may not be dead."""
    if not is_own(folder):
        return
    lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def has_owner(folder: Path) -> bool:
    """True if the process that made this folder is still running."""
    try:
        if not is_own(folder):
            return False
        lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
