"""A node in virtual time: the real machines and the real loop, with a simulated device.

`node/loop.py` gives the loop (`node/turns.py`) a clock, a socket and a model. This file gives it
the timeline, the links and the models of a `World`. It decides nothing either.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coordinator.text.session_events import NodeId
from drafter_node import compute as drafter
from drafter_node import known as drafter_known
from drafter_node import scheduling as drafter_scheduling
from drafter_node.translation.dispatcher import TranslatingDispatcher
from engine.layout.slots import Move
from node.costs import Costs, Passes
from node.dispatcher import Dispatcher
from node.entrance import Entrance, Own
from node.events import Send, Tick, WaitUntil
from node.lanes import Lanes
from node.placing import Place, Placing
from node.turns import Turns
from proto import codec
from proto.errors import RefusedError
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import Heartbeat, Role, SessionMark
from rehearsal.cache import FEATURE_BYTES, CacheError, HeadCache, VirtualCache, feature_of
from rehearsal.device import Device, Digests, Handle
from rehearsal.setting import VOCABULARY
from target_node import compute as target
from target_node import known as target_known
from target_node import scheduling as target_scheduling
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


class _Launched:
    """What the loop sees of a forward. A host that computes lets all messages wait (`blocking`)."""

    def __init__(self, node: "SimulatedNode", due_at: float) -> None:
        self._node, self._due_at = node, due_at

    @property
    def due_at(self) -> float:
        """Return when the first step of it should have ended."""
        return self._due_at

    @property
    def is_on_host(self) -> bool:
        """True if the host computes."""
        return self._node.world.setting.blocking

    def is_ready(self) -> bool:
        """True if the device has ended it."""
        return self._node.is_ready

    def finish(self, *, has_slept: bool) -> drafter.Proposed | target.Computed:
        """Return its result."""
        del has_slept
        return self._node.finish()


class _Link:
    """The node's links, as the loop uses a connection."""

    def __init__(self, node: "SimulatedNode") -> None:
        self._node = node

    def send(self, frame: bytes) -> None:
        """Send a frame to the coordinator."""
        self._node.world.uplinks[self._node.id].send(frame)

    def receive(self, timeout_s: float, *, exact: bool = False) -> Iterator[bytes]:
        """Yield the frames that have arrived."""
        del timeout_s, exact
        inbox = self._node.inbox
        while inbox:
            yield inbox.popleft()


class _NoWatch:
    """A stopwatch that nobody reads: virtual time passes nowhere but on devices and links."""

    def _nothing(self, *_: object) -> None:
        return

    enter = received = sends = device_ended = _nothing


class _Heart:
    """The node's signs of life; heartbeats are sent by `SimulatedNode._beat`."""

    def __init__(self, node: "SimulatedNode") -> None:
        self._node = node
        self.marks: tuple[SessionMark, ...] = ()
        self.watch = _NoWatch()

    def heard(self, beat: Heartbeat) -> None:
        """Note a heartbeat of the coordinator."""
        self._node.heard(beat)

    def ends(self) -> None:
        """Do nothing: `SimulatedNode._beat` looks at the device itself."""


class _Cache:
    """The node's cache, as the loop uses an executor: orders go into the device's queue."""

    fixed_rows: int | None = None

    def __init__(self, node: "SimulatedNode") -> None:
        self._node = node

    def move(self, *moves: Move) -> None:
        """Queue copies of rows."""
        for move in moves:
            self._node.device.move(move)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Queue a copy of the first rows of a lane."""
        self._node.device.copy(source, target, length)

    def wipe(self, lane: int, start: int) -> None:
        """Queue the removal of rows."""
        self._node.device.wipe(lane, start)

    def set_total(self, total: int) -> None:
        """Do nothing: passes read what they need."""


class _Watched:
    """The node's machines, as the loop uses a dispatcher, and whoever watches what they do."""

    def __init__(self, node: "SimulatedNode") -> None:
        self._node = node

    @property
    def marks(self) -> tuple[SessionMark, ...]:
        """Return nothing: `SimulatedNode._beat` asks the dispatcher."""
        return ()

    def story(self, session: int | None = None) -> str:
        """Return the last events of a text."""
        return str(self._node.dispatcher.story(session))

    def handle(self, event: Any, now: float) -> Iterator[Any]:
        """Yield the actions for an event; each is performed before the next one is asked for."""
        return self._node.handled(event, now)


class SimulatedNode:
    """A node process in virtual time: its texts, their schedule, its device, and its loop.

    index  number of this node among those of its role, from 0
    """

    def __init__(self, world: "World", role: Role, index: int = 0) -> None:
        self.world = world
        self.role = role
        self.index = index
        self.name = name_of(role, index)
        self.life = 0  # number of the process; events that an earlier life scheduled are dropped
        self.alive = False
        self.dispatcher: Any = None
        self.entrance: Any = None  # before the dispatcher
        self.device = Device((), world.timeline, self._ended)
        self.deadline = float("inf")  # when the schedule wants the next Tick
        self.progress = 0  # finished forwards
        self._running: _Pass | _Step | None = None  # a forward whose result was not read yet
        self._made: drafter.Proposed | target.Computed | None = None  # a result not read yet
        self._is_called = False  # a message has arrived since the forward began
        self._inbox: deque[bytes] = deque()
        self._loop: Turns[Any, Any]
        # Time stamp of the coordinator's latest heartbeat, and when that arrived.
        self._stamp: tuple[int, float] | None = None

    @property
    def id(self) -> NodeId:
        """Return the name of the process; each life has another one, unless users start it."""
        return f"{self.place}.{self.life}".encode() if not self.is_by_hand else self.place.encode()

    @property
    def place(self) -> str:
        """Return the name of its place, which all of its lives have: target-1, drafter-2 ..."""
        return f"{self.role}-{self.index + 1}"

    @property
    def is_by_hand(self) -> bool:
        """True if a user has started it."""
        return self.world.setting.by_hand and self.role is Role.TARGET

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
        self._running, self._made, self.progress = None, None, 0
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
        self._loop = Turns(
            *(_Link(self), _Heart(self), _Cache(self), _Watched(self), self.launch),
            decode=codec.decode,
            clock=lambda: self.world.timeline.now,
            warn=lambda _: None,
            complain=lambda _: None,
        )
        self._later(HEARTBEAT_INTERVAL_S * self.world.luck.random(), self._beat)

    @property
    def inbox(self) -> deque[bytes]:
        """Return the frames that have arrived and were not handled yet."""
        return self._inbox

    def heard(self, beat: Heartbeat) -> None:
        """Note a heartbeat of the coordinator."""
        self._stamp = beat.stamp_us, self.world.timeline.now

    def handled(self, event: Any, now: float) -> Iterator[Any]:
        """Yield the actions for an event, and tell whoever watches of all that happens."""
        if isinstance(event, Tick):
            self.deadline = float("inf")
        actions = self.entrance.handle(event, now)
        self.world.tell(self.name, "handles", event)
        self.world.watcher.heard(self, event)
        for action in actions:
            self.world.tell(self.name, "does", action)
            if isinstance(action, Send):
                self.world.watcher.sent(self, action.message)
            if isinstance(action, WaitUntil):
                self.deadline = action.deadline
                self._later(action.deadline - now, self._wake)
            yield action
        self.world.watcher.handled(self, event)
        if isinstance(event, Tick):
            self.world.watcher.rested(self)

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
        self._inbox.append(frame)
        self._is_called = True
        if not (self.world.setting.blocking and self.is_computing):
            self._turn()

    def _turn(self) -> None:
        """Let the loop handle what has arrived or ended. A node that is refused ends."""
        try:
            self._loop.turn(0.0)
        except RefusedError:
            self.crash()

    def _wake(self) -> None:
        if self.world.timeline.now >= self.deadline and not (
            self.world.setting.blocking and self.is_computing
        ):
            self._turn()

    # -- the device -------------------------------------------------------------------------------

    def launch(self, action: drafter.Compute | target.Compute) -> "_Launched":
        """Launch a forward; the loop gives its result to the machine when it has ended."""
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
        now = self.world.timeline.now
        expected_s = self.world.setting.expected * (handle.ends_at - now)
        return _Launched(self, now + expected_s)

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
        running = self._running
        assert running is not None, "a forward ends that nobody waits for"
        result = running.handle.result()
        if isinstance(running, _Pass):
            self._made = target.Computed(running.ticket, result, running.model_us)
        elif not running.first.ahead:
            self._made = drafter.Proposed(running.ticket, result, running.model_us)
        elif not self._is_followed(running, (*running.before, *result[0])):
            chain = (*running.before, *result[0])
            self._made = drafter.Proposed(running.ticket, (chain,), running.model_us, len(chain))
        if self._made is not None:
            self._turn()

    def _is_followed(self, step: _Step, chain: tuple[drafter.Children, ...]) -> bool:
        """Launch the next step of a chain; False: it has ended, as a message came or none follows.

        Of such a launch the loop sees the end alone.
        """
        if self._is_called or not step.first.is_followed(chain):
            return False
        handle, step_us = self._launch((step.first.after(chain),), self._drafted)
        self._running = _Step(step.ticket, handle, step.model_us + step_us, step.first, chain)
        return True

    @property
    def is_ready(self) -> bool:
        """True if the device has ended what the loop has launched."""
        return self._made is not None

    def finish(self) -> drafter.Proposed | target.Computed:
        """Return what the device has made of it."""
        made, self._made, self._running = self._made, None, None
        assert made is not None, "a result is read before it is ready"
        self.progress += made.num_steps if isinstance(made, drafter.Proposed) else 1
        return made

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


def name_of(role: Role, index: int) -> str:
    """Return a node's name in stories; `index`: among those of its role, from 0."""
    return f"{role} {index + 1}" if index else str(role)


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
