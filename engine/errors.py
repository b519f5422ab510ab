"""Errors of the engine that a user can do something about.

    EngineError
    ├── ModelError      the model, its folder, or its device cannot be used
    │   └── OutOfMemory     there is not enough memory now; another time there may be
    ├── RankError       a process that shares the model has ended
    ├── NotFinite       one text's logits hold NaN or infinity; other texts go on
    └── GrammarError    a text's grammar is wrong, or too complex at some place; other texts go on

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
    """There is not enough memory for a model now."""


class RankError(EngineError):
    """The processes that share a model cannot go on together."""


class NotFinite(EngineError):
    """The logits of a text hold NaN or infinity; other texts are not affected."""


class GrammarError(EngineError):
    """A grammar is wrong, or too complex at some place of a text."""


def remedy(error: Exception) -> str:
    """Return why a file cannot be read, in the system's words, and what to do about it."""
    reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())[:200]
    number = error.errno if isinstance(error, OSError) else None
    return f"{reason}; {_READ.get(number or 0, 'get it again')}"


def without_room(error: OSError) -> str:
    """Return why a process cannot be started, and where it is known what to do about it."""
    advice = _START.get(error.errno or 0)
    reason = error.strerror or str(error)
    return f"{reason}; {advice}" if advice else reason


def lacks_memory(error: BaseException) -> bool:
    """True if an error of torch or numpy says that there is not enough memory."""
    return isinstance(error, MemoryError) or kind_of(error) is OutOfMemory


def kind_of(cause: BaseException) -> type[ModelError]:
    """Return the class to raise for an error of torch: OutOfMemory if it says so, else ModelError.

    The message is searched, because torch has no class of its own for a CPU's lack of memory.
    """
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # the last one: cuBLAS
    return OutOfMemory if any(word in str(cause) for word in words) else ModelError
