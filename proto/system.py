"""Explains errors of the operating system, and checks paths and open-file limits beforehand."""

import contextlib
import errno
import mmap
import os
import resource
from collections.abc import Mapping
from pathlib import Path

from proto import memory
from proto.errors import ConfigurationError, TransportError

# -- system errors ---------------------------------------------------------------------------------

RAISE_THE_LIMIT = "raise the limit of open files (ulimit -n)"
ROOM = "make room there"
MOST_SHOWN = 200  # letters of a library's own words
# Advice by error number, for reading and for writing.
_READ = {
    errno.EACCES: "see that you may read it",
    errno.EPERM: "see that you may read it",
    errno.EISDIR: "give a file",
    errno.EIO: "look after the disk",
}
_WRITE = {
    errno.EACCES: "choose a place where you may write",
    errno.EPERM: "choose a place where you may write",
    errno.EROFS: "choose a place that is not read-only",
    errno.ENOENT: "make its folder first",
    errno.EISDIR: "give the name of a file",
    errno.EEXIST: "choose another name",
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EFBIG: "raise the limit of how long files may be (ulimit -f)",
    errno.EIO: "look after the disk",
}
_START = {errno.EAGAIN: "end other processes, or raise their limit (ulimit -u)"}
_ALWAYS = {
    errno.EMFILE: RAISE_THE_LIMIT,
    errno.ENFILE: RAISE_THE_LIMIT,
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a part of its path is a file",
    errno.ELOOP: "its links lead in a circle",
    errno.ENOMEM: "end something else: there is no memory left",
}


def cannot_read(error: Exception, otherwise: str = "") -> str:
    """Return why something cannot be read, and what to do about it where that is not obvious.

    error      of the system, or of a library that finds a file damaged
    otherwise  the advice for every other error; "": there is none
    """
    return _told(error, _READ, otherwise)


def cannot_write(error: OSError) -> str:
    """Return why something cannot be written, and what to do about it where that is known."""
    return _told(error, _WRITE)


def cannot_start(error: OSError) -> str:
    """Return why a process cannot be started, and what to do about it where that is known."""
    return _told(error, _START)


def remedy(error: OSError, otherwise: str) -> str:
    """Return advice for a process or folder that cannot be made; else return `otherwise`."""
    number = error.errno or 0
    return _ALWAYS.get(number) or _WRITE.get(number) or otherwise


def unexplained(error: OSError) -> str:
    """Return a line for a system error of which it is unknown whether a read or a write failed."""
    advice = {number: what for number, what in _WRITE.items() if number not in _READ}
    del advice[errno.ENOENT], advice[errno.EEXIST]
    told = _told(error, advice)
    return told if error.filename is None else f"{error.filename}: {told}"


def _told(error: Exception, by_number: Mapping[int, str], otherwise: str = "") -> str:
    number, reason = 0, ""
    if isinstance(error, OSError):
        number, reason = error.errno or 0, error.strerror or ""
    advice = _ALWAYS.get(number) or by_number.get(number) or otherwise
    reason = reason or " ".join(str(error).split())[:MOST_SHOWN] or type(error).__name__
    return f"{reason}; {advice}" if advice else reason


# -- paths -----------------------------------------------------------------------------------------

# Whether a name is that of a folder, and whether a file can be written.
#
# Whatever the name is, no exceptions other than our own leave these functions.


def path_of(name: str) -> Path:
    """Return the name as a path; a leading `~` becomes a home folder, if there is such a user."""
    return Path(os.path.expanduser(name))


def is_folder(name: str) -> bool:
    """True if a folder of this name can be seen; False also for an impossible name."""
    try:
        return path_of(name).is_dir()
    except (OSError, ValueError):
        return False


def cache_folder(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder `name` of what is kept for later starts; it may not be there yet.

    It is in $XDG_CACHE_HOME/slipstream, or ~/.cache/slipstream without that variable.

    Raises:
        OSError: this user has no home.
    """
    named = environment.get("XDG_CACHE_HOME", "")
    try:
        # By the XDG convention, a path that is not absolute is ignored.
        base = Path(named) if os.path.isabs(named) else Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return base / "slipstream" / name


def check_writable(path: Path, flag: str) -> None:
    """Raise ConfigurationError if the file cannot be written; the file is left as it was.

    A new file is made for a moment with one byte in it: a full disk takes empty files.

    flag  the option by which the file was given, such as --trace
    """
    try:
        is_new = not path.exists()
        with path.open("ab") as file:
            if is_new:
                path.unlink()
                file.write(b" ")
                file.flush()
    except OSError as error:
        raise ConfigurationError(
            f"{flag}: {path} cannot be written: {cannot_write(error)}"
        ) from error


# -- descriptors -----------------------------------------------------------------------------------

# Open files and sockets: how many a process needs, and an error if it may not open so many.

SPARE_BYTES = 64 << 20  # of address space: the stacks of ZeroMQ's threads, and what it allocates
SPARE = 32  # more files than any of our processes opens after this check: 18 were counted


def check_spare() -> None:
    """Raise TransportError if this process may not open as many files as it will need.

    Called before anything is opened: if the limit is met later, ZeroMQ ends the process. The same
    holds for memory, where it is limited (`ulimit -v`): MemoryError.
    """
    if memory.is_limited():
        try:
            mmap.mmap(-1, SPARE_BYTES).close()
        except OSError as error:
            raise MemoryError(
                "too little memory is left for connections; raise the limit (`ulimit -v`)"
            ) from error
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit - _num_open(limit) < SPARE:
        raise TransportError(
            f"this process may have {limit} files open, of which fewer than {SPARE} are left; "
            f"{RAISE_THE_LIMIT}"
        )


def may_open(wanted: int) -> int:
    """Return how many more files this process may open, SPARE left over; at most `wanted`.

    The limit is raised as far as that needs and the system allows. Not further: what this process
    starts has the same limit, and some programs close every number below it.
    """
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    needed = _num_open(limit) + wanted + SPARE
    if needed > limit:
        allowed = needed if highest == resource.RLIM_INFINITY else min(needed, highest)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, allowed), highest))
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(0, min(wanted, limit - _num_open(limit) - SPARE))


def _num_open(limit: int) -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # no descriptor is left, not even for this folder
        return limit
