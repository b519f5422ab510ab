"""What can go wrong in the engine for a reason that a user can mend.

    EngineError
    └── ModelError      the model, its folder, or its device cannot be used

Every message is one line and says what to do. Programmer errors are assertions, not these.
"""


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ModelError(EngineError):
    """A model cannot be loaded, or this engine cannot run it exactly."""
