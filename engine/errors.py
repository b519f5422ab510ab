"""Errors of the engine that a user can do something about.

    EngineError         of `proto/errors.py`, as is ModelError
    ├── ModelError      the model, its folder, or its device cannot be used
    │   └── OutOfMemory     there is not enough memory now; another time there may be
    ├── RankError       a process that shares the model has ended
    ├── NotFinite       one text's logits hold NaN or infinity; other texts go on
    └── GrammarError    a text's grammar is wrong, or too complex at some place; other texts go on

Every message is one line and says what to do. Programmer errors are assertions, not these.
"""

from proto.errors import EngineError as EngineError
from proto.errors import ModelError as ModelError

GET_AGAIN = "get it again"  # a file that is damaged


class OutOfMemory(ModelError):
    """There is not enough memory for a model now."""


class RankError(EngineError):
    """The processes that share a model cannot go on together."""


class NotFinite(EngineError):
    """The logits of a text hold NaN or infinity; other texts are not affected."""


class GrammarError(EngineError):
    """A grammar is wrong, or too complex at some place of a text."""


def lacks_memory(error: BaseException) -> bool:
    """True if an error of torch or numpy says that there is not enough memory."""
    return isinstance(error, MemoryError) or kind_of(error) is OutOfMemory


def kind_of(cause: BaseException) -> type[ModelError]:
    """Return the class to raise for an error of torch: OutOfMemory if it says so, else ModelError.

    The message is searched, because torch has no class of its own for a CPU's lack of memory.
    """
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # the last one: cuBLAS
    return OutOfMemory if any(word in str(cause) for word in words) else ModelError
