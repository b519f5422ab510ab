"""A node in virtual time: the real dispatcher and schedule, with a simulated device.

`node/loop.py` uses a clock, a socket and a model; this file uses the timeline, the links and the
models of a `World` instead. It decides nothing either.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coordinator.text.session import NodeId
from drafter_node import compute as drafter
from drafter_node import scheduling as drafter_scheduling
from drafter_node import statistics as drafter_known
from drafter_node.translation.dispatcher import TranslatingDispatcher
from node.costs import Costs, Passes
from node.dispatcher import Dispatcher
from node.entrance import Entrance, Own
from node.events import (
    Afterwards,
    Allocate,
    Arrived,
    CopyPrefix,
    MoveRows,
    Send,
    Tick,
    WaitUntil,
    Wipe,
)
from node.lanes import Lanes
from node.placing import Place, Placing
from proto import codec
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import Heartbeat, Message, Role
from rehearsal.cache import FEATURE_BYTES, CacheError, HeadCache, VirtualCache, feature_of
from rehearsal.device import Device, Digests, Handle
from rehearsal.setting import VOCABULARY
from target_node import compute as target
from target_node import scheduling as target_scheduling
from target_node import statistics as target_known
from target_node.accepting import rows_on_text

if TYPE_CHECKING:
    from rehearsal.world import World


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass of the target that is running."""

    ticket: int
    handle: Handle
    model_us: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A draft step that is running.

    first     the part whose further steps (`ahead`) this may be one of
    before    the children that were chosen by the steps before it in the same chain
    model_us  microseconds of this step and of those before it
    """

    ticket: int
    handle: Handle
    model_us: int
    first: drafter.Part
    before: tuple[drafter.Children, ...]


class Node:
    """A node process in virtual time: its texts, their schedule, its device, and its loop.

    index  number of this node among those of its role, from 0
    """

    def __init__(self, world: "World", role: Role, index: int = 0) -> None:
        self.world = world
        self.role = role
        self.index = index
        self.name = f"{role} {index + 1}" if index else str(role)
        self.life = 0  # number of the process; events that an earlier life scheduled are dropped
        self.alive = False
        self.dispatcher: Any = None
        self.entrance: Any = None  # before the dispatcher
        self.device = Device((), world.timeline, self._ended)
        self.deadline = float("inf")  # when the schedule wants the next Tick
        self.progress = 0  # finished forwards
        self._running: _Pass | _Step | None = None  # a forward whose result was not read yet
        self._is_called = False  # a message has arrived since the forward began
        self._inbox: deque[Message] = deque()
        # Time stamp of the coordinator's latest heartbeat, and when that arrived.
        self._stamp: tuple[int, float] | None = None

    @property
    def id(self) -> NodeId:
        """Return the name of the process; each life has another one."""
        return f"{self.name}.{self.life}".encode()

    @property
    def is_computing(self) -> bool:
        """True while a forward runs whose result was not read yet."""
        return self._running is not None

    def start(self, source: int) -> None:
        """Begin a new life with an empty cache; `source` is a drafter's number as a source."""
        setting = self.world.setting
        self.alive = True
        count = setting.num_lanes(self.role)
        is_head = setting.is_head and self.role is Role.DRAFTER
        make = HeadCache if is_head else VirtualCache
        capacity = setting.capacity(self.role)
        caches = [make(capacity) for _ in range(count)]
        self.device = Device(caches, self.world.timeline, self._ended)
        self._running, self.progress = None, 0
        self.deadline = float("inf")
        self._inbox.clear()
        self._stamp = None
        lanes = Lanes(count, capacity, is_head=is_head)
        together = min(count, setting.num_per_pass)
        dispatcher: Any = Dispatcher(lanes, self._schedule(lanes, source, together))
        if self.role is Role.DRAFTER and setting.languages is not None:
            dispatcher = TranslatingDispatcher(
                dispatcher, setting.languages, setting.drafter_max_len
            )
        self.dispatcher = dispatcher
        self.entrance = Entrance(dispatcher, self._own)
        self._later(HEARTBEAT_INTERVAL_S * self.world.luck.random(), self._beat)

    @property
    def _own(self) -> Own:
        """Return what its model can take."""
        setting = self.world.setting
        if self.role is Role.TARGET:
            return Own(self.role, VOCABULARY)
        return Own(self.role, features=FEATURE_BYTES if setting.is_head else {})

    def _schedule(self, lanes: Lanes, source: int, together: int) -> Any:
        setting = self.world.setting
        if self.role is Role.DRAFTER:
            steps = Passes(setting.drafter.measured)
            reads = drafter_known.Known(
                setting.drafter_max_len,
                source,
                steps,
                is_head=setting.is_head,
                is_translated=setting.languages is not None,
            )
            return drafter_scheduling.Schedule(lanes, reads, num_per_pass=together)
        costs, placing = Costs(setting.target.measured), None
        if setting.placement:
            fixed = Place.SHARED if setting.placement == "shared" else None
            placing = Placing(fixed=fixed, has_drafters_core=True)
        known = target_known.Known(setting.fixed_rows, costs, placing=placing)
        return target_scheduling.Schedule(lanes, known, num_per_pass=together)

    def crash(self) -> None:
        """End this life: the process dies."""
        self.alive = False
        self.device.stop()

    # -- the loop ---------------------------------------------------------------------------------

    def receive(self, frame: bytes) -> None:
        """Take a frame that has arrived; it is handled now, or after the running forward."""
        if not self.alive:
            return
        self._inbox.append(codec.decode(frame))
        self._is_called = True
        if not (self.world.setting.blocking and self.is_computing):
            self._drain()

    def _drain(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Heartbeat):
                self._stamp = message.stamp_us, self.world.timeline.now
            self._handle(Arrived(message))
        self._tick()

    def _tick(self) -> None:
        self.deadline = float("inf")
        self._handle(Tick())
        self.world.watcher.rested(self)

    def _finish(self, event: drafter.Proposed | target.Computed) -> None:
        """Handle a result; if the host is free, launch the next forward before sending messages."""
        self.progress += event.num_steps if isinstance(event, drafter.Proposed) else 1
        self._handle(event)
        if not self.world.setting.blocking:
            self._tick()
        self._handle(Afterwards())
        self._drain()

    def _handle(self, event: Any) -> None:
        actions = self.entrance.handle(event, self.world.timeline.now)
        self.world.tell(self.name, "handles", event)
        self.world.watcher.heard(self, event)
        for action in actions:
            self._perform(action)
        self.world.watcher.handled(self, event)

    def _perform(self, action: Any) -> None:
        self.world.tell(self.name, "does", action)
        match action:
            case Send(message):
                self.world.watcher.sent(self, message)
                self.world.uplinks[self.id].send(codec.encode(message))
            case MoveRows(moves):
                for move in moves:
                    self.device.move(move)
            case CopyPrefix(source, to, length):
                self.device.copy(source, to, length)
            case Wipe(lane, start):
                self.device.wipe(lane, start)
            case drafter.Compute() | target.Compute():
                self._compute(action)
            case WaitUntil(deadline):
                self.deadline = deadline
                self._later(deadline - self.world.timeline.now, self._wake)
            case Allocate():
                pass
            case _:
                raise AssertionError(f"unknown action {action}")

    def _wake(self) -> None:
        if self.world.timeline.now >= self.deadline and not (
            self.world.setting.blocking and self.is_computing
        ):
            self._tick()

    # -- the device -------------------------------------------------------------------------------

    def _compute(self, action: drafter.Compute | target.Compute) -> None:
        if self.is_computing:
            raise CacheError("two forwards at once")
        self.world.watcher.launched(self, action)
        self._is_called = False
        host_s = self.world.setting.costs(self.role).host_s
        if isinstance(action, drafter.Compute):
            handle, model_us = self._launch(action.parts, self._drafted, host_s)
            self._running = _Step(action.ticket, handle, model_us, action.parts[0], ())
        else:
            handle, model_us = self._launch(action.parts, self._verified, host_s)
            self._running = _Pass(action.ticket, handle, model_us)

    def _launch(
        self,
        parts: Sequence[drafter.Part | target.Part],
        compute: Callable[[Sequence[Any], Digests], Any],
        host_s: float = 0.0,
    ) -> tuple[Handle, int]:
        """Launch a forward of these parts; returns its handle and its microseconds."""
        num_rows = sum(len(part.feed.tokens) for part in parts)
        cost_s = self.world.setting.costs(self.role).forward.of(num_rows)
        feeds = [part.feed for part in parts]
        handle = self.device.launch(feeds, lambda seen: compute(parts, seen), cost_s, host_s)
        self.world.watcher.occupied(self, handle.began, handle.ends_at)
        return handle, round(cost_s * 1e6)

    def _verified(self, parts: Sequence[target.Part], seen: Digests) -> tuple[target.Outcome, ...]:
        verify = self.world.models.verify
        return tuple(
            with_features(part, verify(part, _asked(part, rows)), rows)
            for part, rows in zip(parts, seen, strict=True)
        )

    def _drafted(
        self, parts: Sequence[drafter.Part], seen: Digests
    ) -> tuple[tuple[drafter.Children, ...], ...]:
        draft = self.world.models.draft
        return tuple(
            draft(part, _asked(part, rows), self.index)
            for part, rows in zip(parts, seen, strict=True)
        )

    def _ended(self) -> None:
        """Read the result of the forward that has ended, and go on."""
        running, self._running = self._running, None
        assert running is not None, "a forward ends that nobody waits for"
        result = running.handle.result()
        if isinstance(running, _Pass):
            self._finish(target.Computed(running.ticket, result, running.model_us))
        elif not running.first.ahead:
            self._finish(drafter.Proposed(running.ticket, result, running.model_us))
        else:
            self._followed(running, (*running.before, *result[0]))

    def _followed(self, step: _Step, chain: tuple[drafter.Children, ...]) -> None:
        """Launch the next step of a chain; end the chain if a message came or none follows."""
        if self._is_called or not step.first.is_followed(chain):
            self._finish(drafter.Proposed(step.ticket, (chain,), step.model_us, len(chain)))
            return
        handle, step_us = self._launch((step.first.after(chain),), self._drafted)
        self._running = _Step(step.ticket, handle, step.model_us + step_us, step.first, chain)

    # -- time -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        stamp_us, came = self._stamp or (0, 0.0)
        held_us = round((self.world.timeline.now - came) * 1e6) if stamp_us else 0
        marks = self.dispatcher.marks
        beat = Heartbeat(marks, self.progress, "", stamp_us=stamp_us, held_us=held_us)
        if self._running is not None:
            beat = self._with_pass(beat, self._running)
        self.world.uplinks[self.id].send(codec.encode(beat))
        self._later(HEARTBEAT_INTERVAL_S, self._beat)

    def _with_pass(self, beat: Heartbeat, running: _Pass | _Step) -> Heartbeat:
        """Return the heartbeat with what it says of the forward that is under way."""
        return replace(
            beat,
            pass_rows=running.handle.num_rows,
            pass_us=round(max(0.0, self.world.timeline.now - running.handle.began) * 1e6),
            pass_expected_us=running.model_us,
        )

    def _later(self, delay_s: float, happen: Callable[[], None]) -> None:
        life = self.life

        def if_still_alive() -> None:
            if self.alive and self.life == life:
                happen()

        self.world.timeline.at(self.world.timeline.now + delay_s, if_still_alive)


def _asked(part: drafter.Part | target.Part, rows: Sequence[int]) -> Sequence[int]:
    """Return the digests of the rows that are asked."""
    return rows[len(rows) - part.num_asked :]


def with_features(
    part: target.Part, outcome: target.Outcome, digests: Sequence[int]
) -> target.Outcome:
    """Return the outcome with the wanted features of the rows on the text.

    digests  for each row of the part, the digest of the path that it has seen
    """
    if not part.layers:
        return outcome
    rows = rows_on_text(part, outcome)
    data = b"".join(feature_of(digests[row]) for row in rows)
    return replace(outcome, features=target.FeatureRows("digest", len(rows), data))
