"""A target whose drafter fails after some steps, in the way that SLIPSTREAM_TEST_FAILURE names.

After how many, SLIPSTREAM_TEST_FAILING_STEP may say.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from engine.forward.forward import Output
from node.starting import start
from target_node import home_worker as heads
from target_node.__main__ import load_serve

FAILING_STEP = "12"  # by then some drafts have been accepted


def memory(_: Output) -> Output:
    """As torch says it."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def shapes(_: Output) -> Output:
    """As a mistake in a checkpoint or in a kernel shows."""
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x64 and 32x64)")


def nan(made: Output) -> Output:
    """Numbers that are none."""
    return Output(torch.full_like(made.logits, torch.nan))


WAYS: dict[str, Callable[[Output], Output]] = {one.__name__: one for one in (memory, shapes, nan)}


def main() -> int:
    """A node whose drafter fails when it has drafted for a while."""
    fail, begin = WAYS[os.environ["SLIPSTREAM_TEST_FAILURE"]], heads.WithDrafter.__init__
    failing_step = int(os.environ.get("SLIPSTREAM_TEST_FAILING_STEP", FAILING_STEP))
    steps = 0

    def spoil(executor: Any) -> None:
        forward = executor.forward

        def failing(*args: Any) -> Output:
            nonlocal steps
            steps += 1
            made = forward(*args)
            return fail(made) if steps > failing_step else made

        executor.forward = failing

    def begin_to_count(self: Any, config: Any, engine: Any, own_drafter: Any, *args: Any) -> None:
        spoil(own_drafter.executor)
        begin(self, config, engine, own_drafter, *args)

    heads.WithDrafter.__init__ = begin_to_count  # type: ignore[method-assign]
    return start("target", load_serve)


if __name__ == "__main__":
    sys.exit(main())
