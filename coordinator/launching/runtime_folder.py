"""The folder of one coordinator's sockets; those of dead coordinators are swept away.

Its owner holds a lock on the file `owner` in it, which the kernel lets go when the owner ends,
however it ends. Who gets that lock on another's folder may remove it. The file appears in the
folder only when it is locked, so a folder that is just being made is never taken for a dead one.
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
    """Made with mode 0700: only this user can reach the socket in it. Raises OSError.

    It goes with `remove`, with this object or with this process; of what a kill leaves behind, the
    next one gets rid.
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
        """In a forked child: leave the folder to the parent, and do not make it seem alive."""
        if self.remove.detach() is not None:
            os.close(self._lock)


_folders: weakref.WeakSet[RuntimeFolder] = weakref.WeakSet()


def _disown_all() -> None:
    for folder in _folders:
        folder.disown()


os.register_at_fork(after_in_child=_disown_all)


def locked(folder: Path) -> int:
    """The descriptor of the new file `owner`, locked before it has this name. Raises OSError.

    Where locks are not to be had it never gets it, and nobody sweeps the folder.
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
    """Remove the folders in `place` whose owner, a process of this user, is certainly dead."""
    for folder in place.glob(f"{PREFIX}*"):
        # Gone meanwhile, alive, somebody else's, or not one of ours: it is left as it is.
        with contextlib.suppress(OSError):
            remove_if_dead(folder)


def is_own(folder: Path) -> bool:
    """Whether it is a folder, and this user's. Raises OSError."""
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()


def remove_if_dead(folder: Path) -> None:
    """Remove a folder of this user whose owner is dead. Raises OSError: it may not be."""
    if not is_own(folder):
        return
    lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def has_owner(folder: Path) -> bool:
    """Whether the process that made this folder lives."""
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
