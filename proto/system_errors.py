"""What the system says of a file or a process that it refuses, and what to do about it."""

import errno

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
