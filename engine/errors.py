"""What can go wrong in the engine for a reason that a user can mend.

    EngineError
    ├── ModelError      the model, its folder, or its device cannot be used
    │   └── OutOfMemory     there is no room for it now; another time there may be
    ├── RankError       a process that shares the model has ended
    └── NotFinite       of one text the model computes numbers that are none; others go on

Every message is one line and says what to do. Programmer errors are assertions, not these.
"""

import errno

RAISE_THE_LIMIT = "raise the limit of open files (ulimit -n)"
NO_MEMORY = "end something else: there is no memory left"
_ALWAYS = {
    errno.EMFILE: RAISE_THE_LIMIT,
    errno.ENFILE: RAISE_THE_LIMIT,
    errno.ENOMEM: NO_MEMORY,
}
_READ = {
    **_ALWAYS,
    errno.EACCES: "mend its rights",
    errno.EPERM: "mend its rights",
    errno.EIO: "look after the disk",
}
_START = {**_ALWAYS, errno.EAGAIN: "end other processes, or raise their limit (ulimit -u)"}


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ModelError(EngineError):
    """A model cannot be loaded, or this engine cannot run it exactly."""


class OutOfMemory(ModelError):
    """A model that finds no room now."""


class RankError(EngineError):
    """The processes that share a model cannot go on together."""


class NotFinite(EngineError):
    """The logits of a text hold NaN or infinity; nothing is wrong with other texts."""


def remedy(error: Exception) -> str:
    """Why a file cannot be read, in the system's words, and what to do about it."""
    reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())[:200]
    number = error.errno if isinstance(error, OSError) else None
    return f"{reason}; {_READ.get(number or 0, 'get it again')}"


def without_room(error: OSError) -> str:
    """Why a process cannot be started, and what to do about it where that is known."""
    advice = _START.get(error.errno or 0)
    reason = error.strerror or str(error)
    return f"{reason}; {advice}" if advice else reason


def lacks_memory(error: BaseException) -> bool:
    """Whether an error of torch or numpy says that there is no memory."""
    return isinstance(error, MemoryError) or kind_of(error) is OutOfMemory


def kind_of(cause: BaseException) -> type[ModelError]:
    """What to raise because of an error of torch, which says of a CPU's memory in words only."""
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # the last of cuBLAS
    return OutOfMemory if any(word in str(cause) for word in words) else ModelError
