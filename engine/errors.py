"""What can go wrong in the engine for a reason that a user can mend.

    EngineError
    ├── ModelError      the model, its folder, or its device cannot be used
    │   └── OutOfMemory     there is no room for it now; another time there may be
    ├── RankError       a process that shares the model has ended
    └── NotFinite       of one text the model computes numbers that are none; others go on

Every message is one line and says what to do. Programmer errors are assertions, not these.
"""


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


def kind_of(cause: Exception) -> type[ModelError]:
    """What to raise because of an error of torch, which says of a CPU's memory in words only."""
    words = ("out of memory", "can't allocate memory")
    return OutOfMemory if any(word in str(cause) for word in words) else ModelError
