"""The forwards of a node: where their time goes, how long they take, what changes their logits."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from engine import running
from engine.checkpoint.files import one_line
from engine.choice.coupling_on_gpu import Choice, chosen_there
from engine.choice.processors import ProcessorsByText
from engine.errors import EngineError, lacks_memory
from engine.executor import Executor
from engine.forward.forward import Layers, Output
from engine.forward.not_finite import Again, run_again
from engine.layout.slots import Feed
from node.process import Heart
from proto.messages import Open
from proto.node_config import NodeConfig
from proto.stopwatch import Phase

# -- simulated device ------------------------------------------------------------------------------

# A device that is played: a forward ends when it would have ended on the device that is meant.
#
# The node computes with the model that it has, which must take less than that. For the rest of the
# time the host is free, as beside a GPU: the loop hears messages, and shows its machine the result
# when the forward ends. Where a forward follows another within one call, the node waits: it sleeps
# through most of it, so that two such nodes on two cores leave each other alone, and is awake
# shortly before the end, because no sleep ends in time.

AWAKE_S = 0.0002
# So late an end, or by so much of the forward, is in time; but never by a whole forward.
LATE_S, LATE_SHARE = 0.0002, 0.01


class SimulatedDevice:
    """What a forward takes: so long, and so much more for each of its rows.

    clock, sleep  seconds
    """

    def __init__(
        self,
        forward_s: float,
        row_s: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._base_s, self._row_s = forward_s, row_s
        self._clock, self._sleep = clock, sleep

    @classmethod
    def of(cls, config: NodeConfig) -> "SimulatedDevice":
        """The device of a node."""
        return cls(config.simulated_ms / 1e3, config.simulated_ms_per_row / 1e3)

    @property
    def is_simulated(self) -> bool:
        """Whether there is any; else forwards take as long as they take here."""
        return self._base_s > 0 or self._row_s > 0

    def forward_s(self, num_rows: int) -> float:
        """Seconds of a forward of so many rows, the choice of its tokens included."""
        return self._base_s + num_rows * self._row_s

    def at_least(self, measured: Mapping[int, float]) -> dict[int, float]:
        """Seconds of forwards by their rows, where the model takes longer as it does."""
        return {rows: max(self.forward_s(rows), took) for rows, took in measured.items()}

    def end_of(self, started: float, num_rows: int) -> tuple[float, float]:
        """When a forward ends that began at `started`, and by how many seconds that is too late.

        It is asked when the forward was computed, which may have taken too long here; a little
        too long is in time.
        """
        end = started + self.forward_s(num_rows)
        return max(end, self._clock()), self.late_s(end, num_rows)

    def late_s(self, end: float, num_rows: int) -> float:
        """By how many seconds a forward that should end at `end` is late now; a little is 0."""
        late_s, forward_s = self._clock() - end, self.forward_s(num_rows)
        little_s = min(forward_s, max(LATE_S, LATE_SHARE * forward_s))
        return late_s if late_s > little_s else 0.0

    def wait_until(self, end: float) -> bool:
        """Return when the clock says so: asleep at first, awake at the end.

        False: there was nothing to wait for any more.
        """
        left_s = end - self._clock()
        if left_s > AWAKE_S:
            self._sleep(left_s - AWAKE_S)
        while self._clock() < end:
            pass
        return left_s > 0


# -- forwards --------------------------------------------------------------------------------------


class Forwards:
    """Runs one forward after another: `run`, whatever is chosen from its logits, `done`."""

    def __init__(self, executor: Executor, heart: Heart, device: SimulatedDevice) -> None:
        self._executor = executor
        self._heart = heart
        self._device = device
        self._started = 0.0
        self._num_rows = 0
        self._num_forwards = 0  # since `run`, or `run_chain`, began
        self._has_begun = False  # the device beside the host has; nobody has waited for its end
        # The last one that is done, on a device beside the host, by `time.perf_counter`.
        self.ends_at: float | None = None
        self._processors = ProcessorsByText()

    def run(
        self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]], layers: Layers = ()
    ) -> Output:
        """Run a forward; what it returns is on the device, feed by feed.

        asks    for each feed the rows whose logits are wanted: [sum of their lengths, V]
        layers  whose hidden states are wanted, of all rows (`Executor.forward`)
        """
        running.begin()
        self._started = time.perf_counter()
        self._num_rows = sum(len(feed.tokens) for feed in feeds)
        self._num_forwards = 1
        self._heart.watch.enter(Phase.PREPARE)
        self._heart.watch.forward(self._num_rows, sum(map(len, asks)))
        laid_out = self._executor.lay_out(feeds, asks)
        self._heart.watch.enter(Phase.MODEL)
        if self._device.is_simulated:  # it begins when it is given the rows
            self._started = time.perf_counter()
            self._heart.watch.device_begins()
            self._has_begun = True
        out = self._executor.forward(laid_out, layers)
        self._heart.watch.enter(Phase.CHOOSE)
        return out

    def run_again(self, feed: Feed, num_asked: int, layers: Layers = ()) -> Again:
        """Within the pass that runs: make one lane's part of it again, row by row."""
        self._heart.watch.enter(Phase.MODEL)
        out = run_again(self._executor, feed, num_asked, layers)
        self._heart.watch.enter(Phase.CHOOSE)
        return out

    def can_chain(self, feeds: Sequence[Feed], choice: Choice) -> bool:
        """Whether `run_chain` may be called."""
        return not self._device.is_simulated and self._executor.can_chain(feeds, choice)

    def run_chain(
        self, feeds: Sequence[Feed], choice: Choice, inputs: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        """Run `Executor.run_chain`; returns what every step has chosen, and its score."""
        running.begin()
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

    def without_memory(self, error: RuntimeError | MemoryError) -> str:
        """A pass has found no memory, and was not made. Returns what to say of it, in a line.

        Raises:
            EngineError: ranks of a model cannot go on without a pass that others are in.
            RuntimeError: it is another error.
        """
        if not lacks_memory(error):
            raise error
        line = f"memory was missing in the middle of a text ({one_line(error)}): use a lower "
        line += "--max-model-len or --max-num-seqs, or end what else runs there"
        loaded = getattr(self._executor, "loaded", None)
        if loaded is not None and loaded.rank is not None:
            raise EngineError(line) from error
        if torch.cuda.is_available():  # what is kept for later may be of other sizes
            torch.cuda.empty_cache()
        self.trouble(line)
        return line

    def done(self) -> int:
        """The choice is made; returns the microseconds from the beginning of `run` to its end.

        On a device that is simulated that may lie ahead.
        """
        running.end()
        self._heart.progress += self._num_forwards
        self._heart.num_uncaptured = self._executor.num_uncaptured
        ended = time.perf_counter()
        if self._device.is_simulated:
            ended, late_s = self._device.end_of(self._started, self._num_rows)
            self.ends_at = ended
            self._overran(late_s)
        return round((ended - self._started) * 1e6)

    def woke(self) -> None:
        """Whoever slept until that end has woken: too late, if others had the core then."""
        if self.ends_at is not None:
            self._overran(self._device.late_s(self.ends_at, self._num_rows))

    def _overran(self, late_s: float) -> None:
        if late_s:
            self._heart.overran(late_s)

    def wait(self) -> None:
        """Until the device has ended the last forward that is done."""
        if self._has_begun and self.ends_at is not None:
            self._heart.watch.enter(Phase.WAIT)
            if self._device.wait_until(self.ends_at):
                self.woke()
        if self._has_begun:  # also where it has failed, and no end is known
            self._heart.watch.device_ended()
            self._has_begun = False
