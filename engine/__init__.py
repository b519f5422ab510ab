"""One model on its device, or on several ranks: weights, KV cache, sampling.

Knows tokens and tensors, no session and no message.
"""

from typing import TYPE_CHECKING

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # Code of a program that has a module `engine` of its own may get this one.
        raise AttributeError(
            f"module 'engine' has no attribute {name!r}: it is Slipstream's, in this process, and "
            "a module of yours with the same name cannot be used beside it"
        )
