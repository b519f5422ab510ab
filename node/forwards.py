"""The forwards of a node: where their time goes, how long they take, what changes their logits."""

import time
from collections.abc import Sequence

import torch

from engine.device_choice import Choice, chosen_there
from engine.executor import Executor
from engine.features import Layers
from engine.forward import Output
from engine.not_finite import Again, run_again
from engine.processors import ProcessorsByText
from engine.slots import Feed
from node.process import Heart
from node.simulated_device import SimulatedDevice
from proto.messages import Open
from proto.stopwatch import Phase


class Forwards:
    """Runs one forward after another: `run`, whatever is chosen from its logits, `done`."""

    def __init__(self, executor: Executor, heart: Heart, device: SimulatedDevice) -> None:
        self._executor = executor
        self._heart = heart
        self._device = device
        self._started = 0.0
        self._num_rows = 0
        self._num_forwards = 0  # since `run`, or `run_chain`, began
        self._processors = ProcessorsByText()

    def run(
        self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]], layers: Layers = ()
    ) -> Output:
        """Run a forward; what it returns is on the device, feed by feed.

        asks    for each feed the rows whose logits are wanted: [sum of their lengths, V]
        layers  whose hidden states are wanted, of all rows (`Executor.forward`)
        """
        self._started = time.perf_counter()
        self._num_rows = sum(len(feed.tokens) for feed in feeds)
        self._num_forwards = 1
        self._heart.watch.enter(Phase.PREPARE)
        self._heart.watch.forward(self._num_rows, sum(map(len, asks)))
        laid_out = self._executor.lay_out(feeds, asks)
        self._heart.watch.enter(Phase.MODEL)
        out = self._executor.forward(laid_out, layers)
        self._heart.watch.enter(Phase.CHOOSE)
        return out

    def run_again(self, feed: Feed, num_asked: int, layers: Layers = ()) -> Again:
        """Within the pass that runs: make one lane's part of it again, row by row."""
        self._heart.watch.enter(Phase.MODEL)
        out = run_again(self._executor, feed, num_asked, layers)
        self._heart.watch.enter(Phase.CHOOSE)
        return out

    @property
    def can_chain(self) -> bool:
        """Whether `run_chain` may be called."""
        return self._executor.can_chain and not self._device.is_simulated

    def run_chain(
        self, feeds: Sequence[Feed], choice: Choice, inputs: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        """Run `Executor.run_chain`; returns what every step has chosen, and its score."""
        self._started = time.perf_counter()
        self._num_rows, self._num_forwards = 1, len(feeds)
        self._heart.watch.enter(Phase.PREPARE)  # so that a trace tells it from the step before
        for _ in feeds:
            self._heart.watch.forward(1, 1)
        self._heart.watch.enter(Phase.MODEL)
        found = self._executor.run_chain(feeds, choice, inputs)
        self._heart.watch.enter(Phase.CHOOSE)
        return chosen_there(found)

    def processed(
        self,
        logits: torch.Tensor,
        opened: Open,
        committed: Sequence[int],
        drafted: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """The logits [n, V] after the processors of a text.

        committed  the text so far; the same list each time
        drafted    per row, the tokens between it and the choice
        """
        processors = self._processors.of(opened, committed, logits.shape[1])
        return processors.apply(logits, drafted)

    def trouble(self, line: str) -> None:
        """Let people hear of it (`Heart.trouble`)."""
        self._heart.trouble(line)

    def done(self) -> int:
        """The choice is made; returns the microseconds since `run` began."""
        self._heart.progress += self._num_forwards
        self._heart.num_uncaptured = self._executor.num_uncaptured
        if self._device.is_simulated:
            self._heart.watch.enter(Phase.MODEL)
            if late_s := self._device.await_end(self._started, self._num_rows):
                self._heart.overran(late_s)
        return round((time.perf_counter() - self._started) * 1e6)
