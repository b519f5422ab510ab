"""A drafter that fails, in the way that SLIPSTREAM_TEST_FAILURE names."""

import os
import signal
import sys
from typing import Any, NoReturn

from drafter_node.__main__ import load_serve
from engine.errors import OutOfMemory
from node import loading
from node.loop import Loop
from node.starting import start
from proto.errors import NodeError

FAILING_STEP = 12  # by then some drafts have been accepted


def exit_(*_: Any, **__: Any) -> NoReturn:
    """Without a word, and without any cleaning up."""
    os._exit(3)


def memory_error(*_: Any, **__: Any) -> NoReturn:
    """Nobody catches this one."""
    raise MemoryError


def too_large(*_: Any, **__: Any) -> NoReturn:
    """As the engine says it."""
    raise OutOfMemory("the drafter's weights do not fit on cuda:0")


def killed(*_: Any, **__: Any) -> NoReturn:
    """As the system does it when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process has been killed")


def fault(*_: Any, **__: Any) -> NoReturn:
    """An error of ours, which is told to the coordinator."""
    raise NodeError("the device has been taken away")


def garbage(drafter: Loop[Any, Any]) -> None:
    """Frames that nobody can read."""
    for _ in range(20):
        drafter.connection.send(b"\xff" * 9)


WAYS = {one.__name__: one for one in (exit_, memory_error, too_large, killed, fault, garbage)}


def main() -> int:
    """A node that fails while it loads or, with `run`, after some steps."""
    way, _, when = os.environ["SLIPSTREAM_TEST_FAILURE"].partition(" ")
    fail = WAYS[way]
    if when == "load":
        loading.load_engine = fail  # type: ignore[assignment]
        return start("drafter", load_serve)
    turn = Loop.turn
    has_failed = False

    def fail_later(self: Loop[Any, Any], *args: Any) -> Any:
        nonlocal has_failed
        if not has_failed and self.heart.progress >= FAILING_STEP:  # one turn may run several steps
            has_failed = True
            fail(self)
        return turn(self, *args)

    Loop.turn = fail_later  # type: ignore[method-assign]
    return start("drafter", load_serve)


if __name__ == "__main__":
    sys.exit(main())
