"""One turn of a node's loop, on whatever clock, link and device it is given (pure).

A turn receives all messages and lets the machine tick, and performs the actions that the machine
asks for. It decides nothing, and passes a Compute on unread. A forward is *launched* when the
machine asks for a Compute, *computed* when its result is an event for the machine, and *told* when
Afterwards was. In which order, `_plain` and `_overlapped` say, side by side:

    _plain       the host itself computes. All messages about the forward are sent before the next
                 one, because they would wait for the whole of it.
    _overlapped  a device computes, and the host is free: meanwhile messages are received and the
                 machine ticks, so that it is prepared when the result comes. Then the device is
                 idle, so the next forward is launched before messages about this one are sent, but
                 for those that the machine has asked for with the result.

The nodes' processes run it (`loop.py`) with a socket, a clock and a model; the simulator runs it in
virtual time (`rehearsal/node.py`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from engine.layout.slots import NUM_TREE_SLOTS, Move
from node.events import (
    Afterwards,
    Allocate,
    Arrived,
    CopyPrefix,
    MoveRows,
    Remember,
    Send,
    SharedAction,
    Tick,
    WaitUntil,
    Wipe,
)
from proto.codec import encode
from proto.errors import ClosedError, ConfigurationError, NodeError, RefusedError
from proto.liveness import SILENCE_LIMIT_S, FaultDetector
from proto.messages import BROKEN_OFF, Close, Fault, FaultCode, Heartbeat, Message, SessionMark
from proto.stopwatch import Phase

IDLE_S = 1.0
POLL_S = 0.00005  # a device that should have ended is asked again after so many seconds
# A device has failed if a forward is so many seconds late, and so many times as long as expected.
LATE_LIMIT_S, LATE_LIMIT_TIMES = 60.0, 20.0

Compute = TypeVar("Compute")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
Result_contra = TypeVar("Result_contra", contravariant=True)
Action_co = TypeVar("Action_co", covariant=True)


# -- a forward that was launched -------------------------------------------------------------------


class Launched(Protocol[Result_co]):
    """A forward that was launched: by the host, which computes it at once, or on a device."""

    @property
    def due_at(self) -> float | None:
        """Return from when on to ask whether it has ended, by the loop's clock; None: it has."""

    @property
    def is_on_host(self) -> bool:
        """Return whether the host computes it, so that nothing is received until it has ended."""

    def is_ready(self) -> bool:
        """Return whether the device has ended it; cheap to ask."""

    def finish(self, *, has_slept: bool) -> Result_co:
        """Return the result, once it is ready; `has_slept`: the loop has slept until then."""


@dataclass(frozen=True, slots=True)
class Ended(Generic[Result_co]):
    """A forward that the host itself has computed."""

    result: Result_co
    due_at: None = None
    is_on_host: bool = True

    def is_ready(self) -> bool:
        """Return True."""
        return True

    def finish(self, *, has_slept: bool) -> Result_co:
        """Return the result."""
        del has_slept
        return self.result


# -- what the loop is given ------------------------------------------------------------------------


class Link(Protocol):
    """The connection to the coordinator."""

    def send(self, frame: bytes, /) -> Any:
        """Send a frame."""

    def receive(self, timeout_s: float, *, exact: bool = False) -> Iterable[bytes]:
        """Return the frames that have arrived, after a wait for the first of at most timeout_s."""


class Signs(Protocol):
    """The node's signs of life, and its stopwatch; a `Heart`."""

    marks: tuple[SessionMark, ...]
    watch: Any

    def heard(self, beat: Heartbeat, /) -> None:
        """Note a heartbeat of the coordinator."""

    def ends(self) -> None:
        """Note that no forward is under way any more."""


class Machine(Protocol[Result_contra, Action_co]):
    """The node's state machine. Its actions are performed one by one, as they are yielded."""

    @property
    def marks(self) -> tuple[SessionMark, ...]:
        """Return how far each open text has come here, for a heartbeat."""

    def handle(
        self, event: Arrived | Tick | Afterwards | Result_contra, now: float, /
    ) -> Iterable[Action_co]:
        """Handle an event at `now` (seconds); returns the actions that it asks for."""

    def story(self, session: int | None = None) -> str:
        """Return the last events of a text, or of all, in one line."""


class Cache(Protocol):
    """Moves rows of the KV cache; an `Executor`."""

    @property
    def fixed_rows(self) -> int | None:
        """Return how many rows every pass has in reproducible mode; None: it is off."""

    def move(self, *moves: Move) -> None:
        """Copy rows of a lane to other slots."""

    def copy_prefix(self, source_lane: int, target_lane: int, length: int, /) -> None:
        """Copy the first rows of a lane to another one."""

    def wipe(self, lane: int, start: int, /) -> None:
        """Clear all rows of a lane from slot `start` on."""

    def set_total(self, total: int, /) -> None:
        """Let every pass read so many slots."""


# -- the loop --------------------------------------------------------------------------------------


class Turns(Generic[Compute, Result]):
    """Gives a node's machine a clock, a link and a model, and performs its actions.

    launch   launches the forward of a Compute; its result is the machine's next event
    decode   returns the message in a frame; None: it is dropped
    clock    returns seconds
    warn, complain  take a line for the log: a warning, an error
    silence  detects that the coordinator is lost; None: somebody else watches
    remember  keeps what is found out about texts for later starts
    """

    def __init__(
        self,
        link: Link,
        heart: Signs,
        cache: Cache,
        dispatcher: Machine[Result, SharedAction | Compute],
        launch: Callable[[Compute], Launched[Result]],
        *,
        decode: Callable[[bytes], Message | None],
        clock: Callable[[], float],
        warn: Callable[[str], None],
        complain: Callable[[str], None],
    ) -> None:
        self.connection = link
        self.heart = heart
        self.executor = cache
        self.dispatcher = dispatcher
        self.launch = launch
        self.silence: FaultDetector | None = None
        self.remember: Callable[[Sequence[tuple[Any, ...]]], None] = lambda _: None
        self._decode, self._clock = decode, clock
        self._warn, self._complain = warn, complain
        self._running: Launched[Result] | None = None  # on a device
        self._launched_at = 0.0
        self._computed: deque[Launched[Result]] = deque()  # by the host, and not yet told

    def turn(self, timeout_s: float) -> float:
        """Handle arrived messages and a due result, then tick.

        Returns the seconds that the next turn may wait for messages.

        Raises NodeError, if the device has not ended a forward for far too long; and as `_heard`.
        """
        running = self._running
        if running is not None and running.is_on_host:  # a host in virtual time: it was deaf
            self._running = None
            self._plain(running)
        elif running is not None:
            timeout_s = min(timeout_s, self._left_s(running))
        has_slept = self._receive(timeout_s)
        if running is not None and running is self._running and self._is_over(running):
            self._running = None
            self._overlapped(running, has_slept=has_slept)
        self.heart.marks = self.dispatcher.marks
        if self.silence is not None and self.silence.is_lost(self._clock()):
            raise ClosedError(f"the coordinator has been silent for {SILENCE_LIMIT_S:.0f} s")
        return self._go_on(Tick())

    # -- messages ---------------------------------------------------------------------------------

    def _receive(self, timeout_s: float) -> bool:
        """Handle all messages that arrive; True if there was time to wait and none came."""
        enter, has_slept = self.heart.watch.enter, timeout_s > 0
        enter(Phase.WAIT)
        for frame in self.connection.receive(timeout_s, exact=self._running is not None):
            has_slept = False
            enter(Phase.DECODE)
            self.heart.watch.received(frame)
            message = self._decode(frame)
            enter(Phase.DECIDE)
            if message is not None:
                self._heard(message)
                self._go_on(Arrived(message))
            enter(Phase.WAIT)
        enter(Phase.DECIDE)
        return has_slept

    def _heard(self, message: Message) -> None:
        """Note a message as a sign of life, and act on what it says about this node itself.

        Raises:
            ClosedError: the coordinator says that it ends; only where its silence is watched.
            ConfigurationError: another process has this node's name; only there.
            RefusedError: the coordinator has cut this node off, or a target has joined that it does
                not fit.
        """
        if isinstance(message, Heartbeat):
            self.heart.heard(message)
        if isinstance(message, Close) and message.reason == BROKEN_OFF:
            story = self.dispatcher.story(message.session) or "nothing"
            self._complain(f"text {message.session} was broken off after {story}")
        if isinstance(message, Fault) and message.code is FaultCode.OUTSIDE:
            self._warn(f"a message of this node was dropped: {message.detail}")
        if self.silence is not None:
            self.silence.heard(self._clock())
            if isinstance(message, Fault) and message.code is FaultCode.CLOSED:
                raise ClosedError(message.detail)
            if isinstance(message, Fault) and message.code is FaultCode.UNUSABLE:
                raise ConfigurationError(message.detail)  # another process has this node's name
        if isinstance(message, Fault) and message.code is FaultCode.REFUSED:
            raise RefusedError(f"refused by the coordinator: {message.detail}")

    # -- forwards ---------------------------------------------------------------------------------

    def _left_s(self, running: Launched[Result]) -> float:
        """Return for how many seconds to wait before the device is asked again."""
        left_s = 0.0 if running.due_at is None else running.due_at - self._clock()
        if left_s > 0 or running.is_ready():
            return max(0.0, left_s)
        return POLL_S

    def _is_over(self, running: Launched[Result]) -> bool:
        """True if the device has ended a forward. Raises NodeError if that takes far too long."""
        if running.is_ready():
            return True
        due_at = self._launched_at if running.due_at is None else running.due_at
        expected_s, late_s = due_at - self._launched_at, self._clock() - due_at
        if late_s > max(LATE_LIMIT_S, LATE_LIMIT_TIMES * expected_s):
            raise NodeError(
                f"its device is {late_s:.0f} s late with a forward pass; the system's log (dmesg) "
                "may say why"
            )
        return False

    def _go_on(self, event: Arrived | Tick | Afterwards | Result) -> float:
        """Give the machine an event, and the results of what the host computes for it.

        Returns the seconds that the loop may wait.
        """
        timeout_s = self._do(event)
        while self._computed:
            self._plain(self._computed.popleft())
            timeout_s = 0.0
        return timeout_s

    def _plain(self, computed: Launched[Result]) -> None:
        """Tell what came of a forward that the host has computed; the next turn launches."""
        self.heart.ends()
        self._do(computed.finish(has_slept=False))
        self._do(Afterwards())

    def _overlapped(self, computed: Launched[Result], *, has_slept: bool) -> None:
        """Launch the next forward after one that a device has ended; then tell what came of it."""
        self.heart.watch.device_ended()
        self.heart.ends()
        self._go_on(computed.finish(has_slept=has_slept))
        self._go_on(Tick())
        self._go_on(Afterwards())

    # -- actions ----------------------------------------------------------------------------------

    def _do(self, event: Arrived | Tick | Afterwards | Result) -> float:
        """Give the machine an event and perform its actions; returns seconds the loop may wait."""
        timeout_s = IDLE_S
        for action in self.dispatcher.handle(event, self._clock()):
            timeout_s = min(timeout_s, self._perform(action))
        return timeout_s

    def _perform(self, action: SharedAction | Compute) -> float:
        """Perform an action; returns seconds that the loop may wait because of it."""
        enter = self.heart.watch.enter
        match action:
            case Send(message):
                enter(Phase.SEND)
                frame = encode(message)
                self.heart.watch.sends(frame)
                self.connection.send(frame)
            case MoveRows(moves):
                enter(Phase.MOVE)
                self.executor.move(*moves)
            case CopyPrefix(source, target, length):
                enter(Phase.MOVE)
                self.executor.copy_prefix(source, target, length)
            case Wipe(lane, start):
                enter(Phase.MOVE)
                self.executor.wipe(lane, start)
            case WaitUntil(deadline):
                return deadline - self._clock()
            case Remember(outcomes):
                self.remember(outcomes)
            case Allocate(max_len):
                # The cache has room for the longest text; with fixed rows every pass must read the
                # same number of slots, which is set here.
                if self.executor.fixed_rows is not None:
                    self.executor.set_total(max_len + NUM_TREE_SLOTS)
            case _:
                self._launch(action)
        enter(Phase.DECIDE)
        return IDLE_S

    def _launch(self, action: Compute) -> None:
        """Launch a forward; if the host computes, it has ended when this returns."""
        launched = self.launch(action)
        if launched.due_at is None:
            self._computed.append(launched)
            return
        assert self._running is None, "a device does one thing at a time"
        self._running, self._launched_at = launched, self._clock()
