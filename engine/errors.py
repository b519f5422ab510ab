"""What can go wrong in the engine for a reason that a user can mend.

    EngineError
    ├── ModelError      the model, its folder, or its device cannot be used
    │   └── OutOfMemory     there is no room for it now; another time there may be
    └── RankError       a process that shares the model has ended

Every message is one line and says what to do. Programmer errors are assertions, not these.
"""

import errno

RAISE_THE_LIMIT = "raise the limit of open files (ulimit -n)"


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ModelError(EngineError):
    """A model cannot be loaded, or this engine cannot run it exactly."""


class OutOfMemory(ModelError):
    """A model that finds no room now."""


class RankError(EngineError):
    """The processes that share a model cannot go on together."""


def remedy(error: Exception) -> str:
    """Why a file cannot be read, in the system's words, and what to do about it."""
    reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())[:200]
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{reason}; {RAISE_THE_LIMIT}"
    return (
        f"{reason}; {'mend its rights' if isinstance(error, PermissionError) else 'get it again'}"
    )


def kind_of(cause: Exception) -> type[ModelError]:
    """What to raise because of an error of torch, which says of a CPU's memory in words only."""
    words = ("out of memory", "can't allocate memory")
    return OutOfMemory if any(word in str(cause) for word in words) else ModelError
