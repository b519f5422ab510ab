"""Runs the forwards of a node: times them, simulates slower devices, and processes their logits.

A forward is launched (`Forwards.run`), its tokens are chosen, and it is ended (`Forwards.done`).
Three devices are served alike (`Forwards.as_launched`):

    the host         all of that in one go (`node/turns.py`: `Ended`)
    simulated        likewise, and the result counts from a later moment on (`Simulated`)
    a GPU            the forward and the usual choices are launched; the loop goes on, and asks
                     whether the GPU has passed the point behind them; then the rest is done here
                     (`OnDevice`)
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from engine import running
from engine.checkpoint.checkpoint import find_checkpoint
from engine.checkpoint.files import one_line
from engine.choice.coupling_on_gpu import Choice, Later, chosen_there
from engine.choice.processors import ProcessorsByText
from engine.choice.vocabulary import Vocabulary, read_vocabulary
from engine.device import Point
from engine.errors import EngineError, lacks_memory
from engine.executor import Executor
from engine.forward.forward import Layers, Output
from engine.forward.not_finite import Again, run_again
from engine.layout.slots import Feed
from node.costs import NOTHING_KNOWN, Durations, Measured
from node.process import Heart
from node.turns import Ended, Launched, Result, Result_co
from proto.messages import Open
from proto.node_config import NodeConfig
from proto.stopwatch import Phase

# -- simulated device ------------------------------------------------------------------------------

# Delays each forward so that it takes as long as on the device that is simulated.
#
# The node computes with its own model, which must take less time than that. For the rest of the
# time the host is free, as beside a GPU: the loop receives messages, and gives its machine the
# result when the simulated forward ends. Where one call makes several forwards, the node waits for
# each: it sleeps for most of the time, so that two such nodes on two cores do not disturb each
# other, and polls the clock shortly before the end, because a sleep never ends exactly in time.

AWAKE_S = 0.0002
# A forward counts as in time if it is late by no more than this, or by this share of its time; but
# never if it is late by its whole time.
LATE_S, LATE_SHARE = 0.0002, 0.01


class SimulatedDevice:
    """The device that a node simulates: a forward takes `forward_s`, plus `row_s` for each row.

    clock, sleep  in seconds
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
        """Return the simulated device of a node's config."""
        return cls(config.simulated_ms / 1e3, config.simulated_ms_per_row / 1e3)

    @property
    def is_simulated(self) -> bool:
        """True if a device is simulated; else forwards take as long as they take here."""
        return self._base_s > 0 or self._row_s > 0

    def forward_s(self, num_rows: int) -> float:
        """Return the seconds of a forward of `num_rows` rows, the choice of its tokens included."""
        return self._base_s + num_rows * self._row_s

    def at_least(self, measured: Mapping[int, float]) -> dict[int, float]:
        """Return seconds of forwards by rows: the simulated time, or `measured` if longer."""
        return {rows: max(self.forward_s(rows), took) for rows, took in measured.items()}

    def end_of(self, started: float, num_rows: int) -> tuple[float, float]:
        """Return when a forward that began at `started` ends, and how many seconds late that is.

        Called when the forward was computed, which may have taken too long here; then the end is
        now. A small delay counts as none.
        """
        end = started + self.forward_s(num_rows)
        return max(end, self._clock()), self.late_s(end, num_rows)

    def late_s(self, end: float, num_rows: int) -> float:
        """Return the seconds by which a forward that should end at `end` is late; small ones: 0."""
        late_s, forward_s = self._clock() - end, self.forward_s(num_rows)
        little_s = min(forward_s, max(LATE_S, LATE_SHARE * forward_s))
        return late_s if late_s > little_s else 0.0

    def wait_until(self, end: float) -> bool:
        """Wait until the clock says `end`, asleep, then polling; False if it had passed already."""
        left_s = end - self._clock()
        if left_s > AWAKE_S:
            self._sleep(left_s - AWAKE_S)
        while self._clock() < end:
            pass
        return left_s > 0


@dataclass(frozen=True, slots=True)
class Simulated(Generic[Result_co]):
    """A forward on a simulated device: it is computed, and counts as ended at `due_at`.

    due_at  by `time.perf_counter`, which on Linux is `time.monotonic`
    woke    called when the loop had nothing else to do, slept, and has woken for that end
    """

    result: Result_co
    due_at: float
    woke: Callable[[], None] = lambda: None
    is_on_host: bool = False

    def is_ready(self) -> bool:
        """Return whether the simulated device has ended it."""
        return time.perf_counter() >= self.due_at

    def finish(self, *, has_slept: bool) -> Result_co:
        """Return the result."""
        if has_slept:
            self.woke()
        return self.result


# -- GPU -------------------------------------------------------------------------------------------

# A GPU is asked whether it has ended a forward from this share on of the time that the quickest of
# the last such forwards has taken. Until then the loop may sleep. One of so many rows as were not
# seen yet is asked for at once, and again and again.
ASKED_FROM, NUM_RECENT = 0.8, 16


@dataclass(frozen=True, slots=True)
class OnDevice(Generic[Result_co]):
    """A forward on a GPU, which has ended it when it has passed `point`.

    due_at  by `time.perf_counter`: when it is asked for the first time
    ends    does what is left to the host, and returns the result
    """

    point: Point
    due_at: float
    ends: Callable[[], Result_co]
    is_on_host: bool = False

    def is_ready(self) -> bool:
        """Return whether the GPU has ended it."""
        return self.point.is_passed()

    def finish(self, *, has_slept: bool) -> Result_co:
        """Return the result."""
        del has_slept
        return self.ends()


# -- forwards --------------------------------------------------------------------------------------


def vocabulary_of(config: NodeConfig) -> Vocabulary | None:
    """Return the target's vocabulary as this node finds it; None: it can follow no grammar.

    A drafter's own tokenizer has the target's tokens; a head has none, and the target's is read.
    """
    if config.target:
        folder = find_checkpoint(config.target, config.target_revision)
    else:
        folder = find_checkpoint(config.model, config.revision)
    return read_vocabulary(folder)


Begun = TypeVar("Begun")


def in_two(
    begin: Callable[[], Begun],
    end: Callable[[Begun], Result],
    failed: Callable[[RuntimeError | MemoryError], Result],
) -> Later[Result]:
    """Begin now; return what ends it. An error at either moment becomes the result of `failed`."""
    try:
        begun = begin()
    except (RuntimeError, MemoryError) as error:
        result = failed(error)
        return lambda: result

    def ends() -> Result:
        try:
            return end(begun)
        except (RuntimeError, MemoryError) as error:
            return failed(error)

    return ends


class Forwards:
    """Runs one forward at a time: call `run`, choose tokens from its logits, then call `done`.

    vocabulary  of the target, for texts with a grammar; None: there is none here
    measured    seconds of forwards by their rows, timed at load
    on_gpu      True: a GPU computes, and the loop goes on meanwhile
    """

    def __init__(
        self,
        executor: Executor,
        heart: Heart,
        device: SimulatedDevice,
        vocabulary: Vocabulary | None = None,
        measured: Measured = NOTHING_KNOWN,
        *,
        on_gpu: bool = False,
    ) -> None:
        self._on_gpu = on_gpu and not device.is_simulated
        self._recent: dict[int, deque[float]] = {}  # seconds of the last forwards, by their rows
        self._there: torch.Tensor | None = None  # any result of the last forward
        self._times = Durations(measured)
        self._executor = executor
        self._heart = heart
        self._device = device
        self._started = 0.0
        self._num_rows = 0
        self._num_forwards = 0  # forwards of the last call of `run` or `run_chain`
        # Result of a forward that was asked for no logits: nobody has waited for it yet.
        self._unread: torch.Tensor | None = None
        self._has_begun = False  # a device's forward has begun, and its end was not noted yet
        # When the last forward ends on the simulated device, by `time.perf_counter`.
        self.ends_at: float | None = None
        self._processors = ProcessorsByText(vocabulary)

    def run(
        self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]], layers: Layers = ()
    ) -> Output:
        """Run a forward; returns its output on the device, in the order of the feeds.

        asks    for each feed the rows whose logits are wanted; the logits are [sum of their
                lengths, V]
        layers  layers whose hidden states are wanted, of all rows (`Executor.forward`)
        """
        running.begin()
        self._started = time.perf_counter()
        self._num_rows = sum(len(feed.tokens) for feed in feeds)
        self._num_forwards, self._unread = 1, None
        self._heart.begins(self._num_rows, self._expected_s(self._num_rows))
        num_asked = sum(map(len, asks))
        self._heart.watch.enter(Phase.PREPARE)
        self._heart.watch.forward(self._num_rows, num_asked)
        laid_out = self._executor.lay_out(feeds, asks)
        self._heart.watch.enter(Phase.MODEL)
        if self._device.is_simulated:  # the device begins when it gets the rows
            self._started = time.perf_counter()
        if self._device.is_simulated or self._on_gpu:
            self._heart.watch.device_begins()
            self._has_begun = True
        out = self._executor.forward(laid_out, layers)
        self._there = out.logits
        if not num_asked:
            self._unread = out.logits
        self._heart.watch.enter(Phase.CHOOSE)
        return out

    def run_again(self, feed: Feed, num_asked: int, layers: Layers = ()) -> Again:
        """Compute one lane's part of the running pass again, row by row; return the result."""
        self._heart.watch.enter(Phase.MODEL)
        out = run_again(self._executor, feed, num_asked, layers)
        self._heart.watch.enter(Phase.CHOOSE)
        return out

    def can_chain(self, feeds: Sequence[Feed], choice: Choice) -> bool:
        """True if `run_chain` can run these draft steps in one recorded graph."""
        return not self._device.is_simulated and self._executor.can_chain(feeds, choice)

    def run_chain(
        self, feeds: Sequence[Feed], choice: Choice, inputs: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        """Run several draft steps in one go; return the token that each has chosen, and scores."""
        running.begin()
        self._started = time.perf_counter()
        self._num_rows, self._num_forwards = 1, len(feeds)
        self._heart.begins(len(feeds), len(feeds) * self._expected_s(1))
        self._heart.watch.enter(Phase.PREPARE)  # so that a trace separates it from the last step
        for _ in feeds:
            self._heart.watch.forward(1, 1)
        self._heart.watch.enter(Phase.MODEL)
        found = self._executor.run_chain(feeds, choice, inputs)
        self._heart.watch.enter(Phase.CHOOSE)
        return chosen_there(found)()

    def processed(
        self,
        logits: torch.Tensor,
        opened: Open,
        committed: Sequence[int],
        drafted: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Return the logits [n, V] after a text's grammar, penalties, biases and bans were applied.

        Beside a GPU that still computes the logits, the masks of a grammar are made meanwhile.

        committed  the text so far; the same list object each time
        drafted    for each row, the drafted tokens between the committed text and the choice

        Raises GrammarError.
        """
        processors = self._processors.of(opened, committed, logits.shape[1])
        return processors.apply(logits, drafted)

    def _expected_s(self, num_rows: int) -> float:
        """Return how many seconds a forward of so many rows usually takes; 0: it is not known."""
        return max(self._times.of(num_rows), self._device.forward_s(num_rows))

    def trouble(self, line: str) -> None:
        """Report a problem to people (`Heart.trouble`)."""
        self._heart.trouble(line)

    def without_memory(self, error: RuntimeError | MemoryError) -> str:
        """Handle a pass that failed for lack of memory; returns a line that says so.

        Raises:
            EngineError: the model has several ranks, which cannot go on if one has left a pass.
            RuntimeError: the error is another one than lack of memory; it is raised as it came.
        """
        if not lacks_memory(error):
            raise error
        line = f"memory was missing in the middle of a text ({one_line(error)}): use a lower "
        line += "--max-model-len or --max-num-seqs, or end what else runs there"
        loaded = getattr(self._executor, "loaded", None)
        if loaded is not None and loaded.rank is not None:
            raise EngineError(line) from error
        if torch.cuda.is_available():  # memory that torch keeps for later may be of other sizes
            torch.cuda.empty_cache()
        self.trouble(line)
        return line

    def done(self) -> int:
        """End the forward after the choice of tokens; returns microseconds since `run` began.

        Waits for a GPU's forward from which nothing was fetched (a chunk of a prompt): else the
        next forward would seem to take as long as the rest of this one too. On a simulated device
        the end may lie in the future.
        """
        unread, self._unread = self._unread, None
        if unread is not None:
            Point(unread).wait()
        running.end()
        self._heart.progress += self._num_forwards
        self._heart.num_uncaptured = self._executor.num_uncaptured
        ended = time.perf_counter()
        took_s = (ended - self._started) / self._num_forwards
        self._times.took(self._num_rows, took_s)
        if self._on_gpu and self._num_forwards == 1:
            recent = self._recent.setdefault(self._num_rows, deque(maxlen=NUM_RECENT))
            recent.append(took_s)
        if self._device.is_simulated:
            ended, late_s = self._device.end_of(self._started, self._num_rows)
            self.ends_at = ended
            self._overran(late_s)
        return round((ended - self._started) * 1e6)

    def woke(self) -> None:
        """Note that the loop has woken for the end of the forward; counts how late it woke."""
        if self.ends_at is not None:
            self._overran(self._device.late_s(self.ends_at, self._num_rows))

    def _overran(self, late_s: float) -> None:
        if late_s:
            self._heart.overran(late_s)

    def as_launched(self, ends: Later[Result]) -> Launched[Result]:
        """Return the forward that was run as the loop takes it.

        ends  does what is left to do, calls `done`, and returns the result
        """
        if self._on_gpu and self._there is not None:
            quickest_s = min(self._recent.get(self._num_rows, (0.0,)))
            due_at = self._started + ASKED_FROM * quickest_s
            return OnDevice(Point(self._there), due_at, partial(self._end, ends))
        result = ends()
        if self.ends_at is None:
            return Ended(result)
        self._heart.watch.device_ends_in(max(0.0, self.ends_at - time.perf_counter()))
        return Simulated(result, self.ends_at, self.woke)

    def _end(self, ends: Later[Result]) -> Result:
        self._heart.watch.enter(Phase.CHOOSE)
        result = ends()
        # Further steps of a drafter have begun and ended meanwhile.
        self._heart.ends()
        self._heart.watch.device_ended()
        return result

    @property
    def num_received(self) -> int:
        """Return how many frames the loop has received so far."""
        return self._heart.watch.num_received

    def wait(self) -> None:
        """Wait until the simulated device has ended the last forward that is done."""
        if self._has_begun and self.ends_at is not None:
            self._heart.watch.enter(Phase.WAIT)
            if self._device.wait_until(self.ends_at):
                self.woke()
        if self._has_begun:  # also if the forward has failed, and its end is unknown
            self._heart.watch.device_ended()
            self._has_begun = False
