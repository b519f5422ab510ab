"""What crosses a process boundary, and what it means. Imports no other package of the project."""

from typing import TYPE_CHECKING

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # Code that asks for `proto.Message` wants the distribution proto-plus.
        raise AttributeError(
            f"module 'proto' has no attribute {name!r}: it is Slipstream's, in this process, and "
            "the distribution proto-plus, which has the same name, cannot be used beside it"
        )
