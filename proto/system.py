"""What the system says of a file or a process that it refuses, and what to do about it."""

import errno
import os
import resource
from pathlib import Path

from proto.errors import ConfigurationError, TransportError

# -- system errors ---------------------------------------------------------------------------------

RAISE_THE_LIMIT = "raise the limit of open files (ulimit -n)"
ROOM = "make room there"
# By what was to be done: to read, to write.
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
_ALWAYS = {
    errno.EMFILE: RAISE_THE_LIMIT,
    errno.ENFILE: RAISE_THE_LIMIT,
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a part of its path is a file",
    errno.ELOOP: "its links lead in a circle",
    errno.ENOMEM: "end something else: there is no memory left",
}


def cannot_read(error: OSError) -> str:
    """Why something cannot be read, and what to do about it if that is not plain."""
    return _told(error, _READ)


def cannot_write(error: OSError) -> str:
    """Why something cannot be written, and what to do about it."""
    return _told(error, _WRITE)


def remedy(error: OSError, otherwise: str) -> str:
    """What to do where a process or a folder of ours cannot be made; `otherwise`: likeliest."""
    number = error.errno or 0
    return _ALWAYS.get(number) or _WRITE.get(number) or otherwise


def unexplained(error: OSError) -> str:
    """An error of which it is not known what was to be done."""
    advice = {number: what for number, what in _WRITE.items() if number not in _READ}
    del advice[errno.ENOENT], advice[errno.EEXIST]
    told = _told(error, advice)
    return told if error.filename is None else f"{error.filename}: {told}"


def _told(error: OSError, by_number: dict[int, str]) -> str:
    number = error.errno or 0
    advice = _ALWAYS.get(number) or by_number.get(number)
    reason = error.strerror or str(error) or type(error).__name__
    return f"{reason}; {advice}" if advice else reason


# -- paths -----------------------------------------------------------------------------------------

# Where the name of a model leads, if it is that of a folder; whether a file can be written.
#
# No name ends in an error that is not ours.


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


# -- descriptors -----------------------------------------------------------------------------------

# Open files and sockets: how many a process needs, and what to do where it gets no more.

SPARE = 32  # what any of our processes opens besides what it has, with a margin: 18 were counted


def check_spare() -> None:
    """Raises TransportError if this process may not open what it will need.

    Asked before anything is opened: where the limit is met in the middle, ZeroMQ ends the process.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit - _num_open(limit) < SPARE:
        raise TransportError(
            f"this process may have {limit} files open, of which fewer than {SPARE} are left; "
            f"{RAISE_THE_LIMIT}"
        )


def _num_open(limit: int) -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not even this one could be opened
        return limit
