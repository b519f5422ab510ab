"""The loop of a node, for ever: it receives, lets the machine decide, and performs its actions.

The loop receives all messages, sends the machine a Tick, and performs the actions that the machine
asks for. It decides nothing, and passes a Compute on to the node's worker unread.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from engine.checkpoint.files import one_line
from engine.errors import EngineError, lacks_memory
from engine.executor import Executor
from engine.layout.slots import NUM_TREE_SLOTS
from node.entrance import Handles
from node.events import (
    Afterwards,
    Allocate,
    Arrived,
    CopyPrefix,
    MoveRows,
    Send,
    SharedAction,
    Tick,
    WaitUntil,
    Wipe,
)
from node.process import BadFrames, Heart
from proto.codec import encode
from proto.errors import ClosedError, ConfigurationError, NodeError, RefusedError
from proto.links.transport import Connection
from proto.liveness import SILENCE_LIMIT_S, FaultDetector
from proto.messages import BROKEN_OFF, Close, Fault, FaultCode, Heartbeat, Message
from proto.stopwatch import Phase

logger = logging.getLogger(__name__)

IDLE_S = 1.0

Compute = TypeVar("Compute")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Launched(Generic[Result_co]):
    """A forward that a device was given, with its result.

    result   given to the machine when the device has ended the forward, and not before
    ends_at  when that is, by `time.perf_counter`; None: the host itself has computed the forward,
             which has ended
    woke     called when the loop had nothing else to do, slept, and has woken for that end
    """

    result: Result_co
    ends_at: float | None = None
    woke: Callable[[], None] = lambda: None

    @property
    def left_s(self) -> float:
        """Return the seconds until the device ends the forward; 0 if the host has computed it."""
        return 0.0 if self.ends_at is None else self.ends_at - time.perf_counter()


class Loop(Generic[Compute, Result]):
    """Gives a node's machine a clock, a socket and a model, and performs its actions.

    A turn receives all messages and lets the machine tick. A forward is *launched* when the machine
    asks for a Compute, *computed* when its result is an event for the machine, and *told* when
    Afterwards was. In which order, `_plain` and `_overlapped` say, side by side:

        _plain       the host itself computes, so launching means computing. All messages about the
                     forward are sent before the next one, because they would wait for the whole of
                     it.
        _overlapped  a device computes, and the host is free (today a simulated device alone):
                     meanwhile messages are received and the machine ticks, so that it is prepared
                     when the result comes. Then the device is idle, so the next forward is launched
                     before messages about this one are sent, but for those that the machine has
                     asked for with the result.

    launch  runs a Compute that the machine asks for; its result is the machine's next event
    """

    def __init__(
        self,
        connection: Connection,
        heart: Heart,
        executor: Executor,
        dispatcher: Handles[Result, SharedAction | Compute],
        launch: Callable[[Compute], Launched[Result]],
    ) -> None:
        self.connection = connection
        self.heart = heart
        self.executor = executor
        self.dispatcher = dispatcher
        self.launch = launch
        self._running: Launched[Result] | None = None  # on a device
        self._computed: deque[Launched[Result]] = deque()  # by the host, and not yet told
        self._silence: FaultDetector | None = None

    def run(self, *, has_lifeline: bool = True) -> NoReturn:
        """Serve for ever; with a lifeline (`process.py`) the process ends when that closes.

        Raises:
            ClosedError: the coordinator says that it ends, or is silent; only without a lifeline.
            ConfigurationError: another process has this node's name; only without a lifeline.
            NodeError: the engine cannot go on.
            RefusedError: the coordinator has cut this node off, or a target has joined that it does
                not fit.
            RemoteProtocolError: too many garbled frames have come.
        """
        bad_frames = BadFrames()
        if not has_lifeline:
            self._silence = FaultDetector(time.monotonic())
        timeout_s = 0.0
        try:
            while True:
                timeout_s = self._turn(timeout_s, bad_frames)
        except EngineError as error:
            raise NodeError(str(error)) from error
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            raise NodeError(f"there is no memory left: {one_line(error)}") from error
        except AssertionError:
            logger.error("an invariant is violated after %s", self.dispatcher.story())
            raise

    def _turn(self, timeout_s: float, bad_frames: BadFrames) -> float:
        """Handle arrived messages and a due result, then tick.

        Returns the seconds that the next turn may wait for messages.
        """
        running = self._running
        if running is not None:
            timeout_s = min(timeout_s, running.left_s)
        has_slept = self._receive(timeout_s, bad_frames)
        if running is not None and running.left_s <= 0:
            self._running = None
            self._overlapped(running, has_slept=has_slept)
        self.heart.marks = self.dispatcher.marks
        if self._silence is not None and self._silence.is_lost(time.monotonic()):
            raise ClosedError(f"the coordinator has been silent for {SILENCE_LIMIT_S:.0f} s")
        return self._go_on(Tick())

    def _receive(self, timeout_s: float, bad_frames: BadFrames) -> bool:
        """Handle all messages that arrive; True if there was time to wait and none came."""
        enter, has_slept = self.heart.watch.enter, timeout_s > 0
        enter(Phase.WAIT)
        for frame in self.connection.receive(timeout_s, exact=self._running is not None):
            has_slept = False
            enter(Phase.DECODE)
            self.heart.watch.received(frame)
            message = bad_frames.decode(frame)
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
            ClosedError, ConfigurationError, RefusedError: as `run`.
        """
        if isinstance(message, Heartbeat):
            self.heart.heard(message)
        if isinstance(message, Close) and message.reason == BROKEN_OFF:
            story = self.dispatcher.story(message.session) or "nothing"
            logger.error("text %d was broken off after %s", message.session, story)
        if isinstance(message, Fault) and message.code is FaultCode.OUTSIDE:
            logger.warning("a message of this node was dropped: %s", message.detail)
        if self._silence is not None:
            self._silence.heard(time.monotonic())
            if isinstance(message, Fault) and message.code is FaultCode.CLOSED:
                raise ClosedError(message.detail)
            if isinstance(message, Fault) and message.code is FaultCode.UNUSABLE:
                raise ConfigurationError(message.detail)  # another process has this node's name
        if isinstance(message, Fault) and message.code is FaultCode.REFUSED:
            raise RefusedError(f"refused by the coordinator: {message.detail}")

    # -- forwards ---------------------------------------------------------------------------------

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
        self._do(computed.result)
        self._do(Afterwards())

    def _overlapped(self, computed: Launched[Result], *, has_slept: bool) -> None:
        """Launch the next forward after one that a device has ended; then tell what came of it."""
        self.heart.watch.device_ended()
        self.heart.ends()
        if has_slept:
            computed.woke()
        self._go_on(computed.result)
        self._go_on(Tick())
        self._go_on(Afterwards())

    def _do(self, event: Arrived | Tick | Afterwards | Result) -> float:
        """Give the machine an event and perform its actions; returns seconds the loop may wait."""
        timeout_s = IDLE_S
        for action in self.dispatcher.handle(event, time.monotonic()):
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
                return deadline - time.monotonic()
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
        if launched.ends_at is None:
            self._computed.append(launched)
            return
        assert self._running is None, "a device does one thing at a time"
        self._running = launched
        self.heart.watch.device_ends_in(launched.left_s)
