"""The forwards of a node: where their time goes, how long they take, what changes their logits."""

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from engine.executor import Executor
from engine.processors import Newest
from engine.slots import Feed
from node.process import Heart
from proto.messages import Open
from proto.stopwatch import Phase
from proto.tree import SpeculationTree


class OfText(Protocol):
    """What logits processors look at: the text that is open, and how far it is."""

    opened: Open | None
    tree: SpeculationTree


class Forwards:
    """Runs one forward after another: `run`, whatever is chosen from its logits, `done`."""

    def __init__(self, executor: Executor, heart: Heart, of_text: OfText, least_s: float) -> None:
        """`least_s`: so long a forward takes at least, to emulate a slower device."""
        self._executor = executor
        self._heart = heart
        self._of_text = of_text
        self._least_s = least_s
        self._started = 0.0
        self._processors = Newest()

    def run(self, feed: Feed, ask: Sequence[int]) -> torch.Tensor:
        """Run a forward; returns logits [len(ask), V] of the rows named in `ask`, on the device."""
        self._started = time.perf_counter()
        self._heart.watch.enter(Phase.PREPARE)
        laid_out = self._executor.lay_out((feed,), (ask,))
        self._heart.watch.enter(Phase.MODEL)
        logits = self._executor.forward(laid_out).logits
        self._heart.watch.enter(Phase.CHOOSE)
        return logits

    def processed(self, logits: torch.Tensor, drafted: Sequence[Sequence[int]]) -> torch.Tensor:
        """The logits [n, V] after the processors of the text that is open.

        drafted  per row, the tokens between the committed text and the choice
        """
        opened = self._of_text.opened
        assert opened is not None
        committed = self._of_text.tree.text.tokens
        return self._processors.of(opened, committed, logits.shape[1]).apply(logits, drafted)

    def done(self) -> int:
        """The choice is made; returns the microseconds since `run` began."""
        self._heart.progress += 1
        self._heart.num_uncaptured = self._executor.num_uncaptured
        elapsed_s = time.perf_counter() - self._started
        if self._least_s > elapsed_s:
            time.sleep(self._least_s - elapsed_s)
            elapsed_s = time.perf_counter() - self._started
        return round(elapsed_s * 1e6)
