"""Virtual time, bad links, nodes that die, and the coordinator's host: the machines' whole world.

Nothing here decides anything about a text. The world carries messages (every one through the
codec), runs forwards on toy caches, and tells the judge what happened.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from coordinator.text import session as coordination
from drafter_node import drafting
from drafter_node import events as drafter
from proto import codec
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import (
    Draft,
    Fault,
    Heartbeat,
    Message,
    Role,
    SamplingSpec,
    SessionMark,
    Verdict,
)
from target_node import events as target
from target_node import verifying
from tests.simulation.judge import Judge
from tests.simulation.models import Deterministic, Models
from tests.simulation.scenario import Scenario
from tests.simulation.story import Line
from tests.simulation.timeline import Timeline
from tests.simulation.toys import ToyCache

STORY_LEN = 60
CACHE_KEY_BYTES = 16


class Link:
    """One way between two processes. Until everything heals it may drop, repeat and reorder."""

    def __init__(self, world: "World", name: str, hop_s: float, deliver: Callable[[bytes], None]):
        self.world = world
        self.name = name
        self.hop_s = hop_s
        self.deliver = deliver
        self._last_arrival = 0.0  # messages that are not reordered arrive in order

    def send(self, frame: bytes) -> None:
        """Put a frame on the way."""
        random, faults = self.world.random, self.world.scenario.faults
        faulty = self.world.timeline.now < faults.heal_s
        if faulty and random.random() < faults.drop:
            self.world.tell(self.name, "dropped", frame)
            return
        self._carry(frame, late=faulty and random.random() < faults.reorder, mark=faulty)
        if faulty and random.random() < faults.repeat:
            self._carry(frame, late=random.random() < 0.5, mark=True)

    def _carry(self, frame: bytes, *, late: bool, mark: bool) -> None:
        timeline, random = self.world.timeline, self.world.random
        hop_s = self.hop_s + random.random() * self.world.scenario.costs.jitter_s
        if late:
            arrival = timeline.now + hop_s + random.random() * self.world.late_s
        else:
            arrival = self._last_arrival = max(self._last_arrival, timeline.now + hop_s)

        def arrive() -> None:
            if mark:
                self.world.judge.disturbed()
            self.world.tell(self.name, "arrives", frame)
            self.deliver(frame)

        timeline.at(arrival, arrive)


class Node:
    """A node process: a machine, its device, and the loop around them."""

    def __init__(self, world: "World", role: Role) -> None:
        self.world = world
        self.role = role
        self.life = 0  # of the process; things that an earlier life asked for do not happen
        self.alive = False
        self.machine: Any = None
        self.cache = ToyCache(0)
        self.ticket = 0  # of the Compute whose result has not come yet; 0: none
        self.deadline = float("inf")  # at which the machine wants to be woken
        self.num_outstanding = 0  # results that have not come yet, of any ticket
        self.progress = 0  # finished forwards
        self._busy_until = 0.0
        self._inbox: deque[Message] = deque()

    def start(self) -> None:
        """Begin a life with nothing."""
        scenario = self.world.scenario
        self.life += 1
        self.alive = True
        self.cache = ToyCache(scenario.capacity)
        self.ticket = self.progress = self.num_outstanding = 0
        self.deadline = float("inf")
        self._busy_until = self.world.timeline.now
        self._inbox.clear()
        if self.role is Role.DRAFTER:
            self.machine = drafting.Drafting(
                max_len=scenario.drafter_max_len, num_slots=scenario.capacity
            )
        else:
            self.machine = verifying.Verifying(
                num_slots=scenario.capacity, fixed_rows=scenario.fixed_rows
            )
        self._later(HEARTBEAT_INTERVAL_S * self.world.random.random(), self._beat)

    def crash(self) -> None:
        """End this life."""
        self.alive = False

    def receive(self, frame: bytes) -> None:
        """A frame has come."""
        if not self.alive:
            return
        self._inbox.append(codec.decode(frame))
        if not (self.world.scenario.blocking and self.num_outstanding):
            self._drain()

    def _drain(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            event = drafter.Arrived if self.role is Role.DRAFTER else target.Arrived
            self._handle(event(message))
        self._tick()

    def _tick(self) -> None:
        self.deadline = float("inf")
        self._handle(drafter.Tick() if self.role is Role.DRAFTER else target.Tick())
        self.world.judge.rested(self)

    def _handle(self, event: Any) -> None:
        actions = self.machine.handle(event, self.world.timeline.now)
        self.world.tell(str(self.role), "handles", event)
        for action in actions:
            self._perform(action)
        self.machine.check()
        self.world.judge.handled(self, event)

    def _perform(self, action: Any) -> None:
        self.world.tell(str(self.role), "does", action)
        match action:
            case drafter.Send(message) | target.Send(message):
                self.world.judge.sent(self, message)
                self.world.uplinks[self.role].send(codec.encode(message))
            case drafter.MoveRows(move) | target.MoveRows(move):
                self.cache.move(move)
            case drafter.Compute() | target.Compute():
                self._compute(action)
            case drafter.WaitUntil(deadline) | target.WaitUntil(deadline):
                self.deadline = deadline
                self._later(deadline - self.world.timeline.now, self._wake)
            case drafter.Allocate() | target.Allocate():
                pass
            case _:
                raise AssertionError(f"unknown action {action}")

    def _compute(self, action: drafter.Compute | target.Compute) -> None:
        """The device works in order; the result comes when the time that it costs is over."""
        costs, now = self.world.scenario.costs, self.world.timeline.now
        digests = self.cache.run(action.feed)
        num_rows = len(action.feed.tokens)
        cost_s = (num_rows - 1) * costs.row_s
        cost_s += costs.draft_s if self.role is Role.DRAFTER else costs.pass_s
        self._busy_until = max(self._busy_until, now) + cost_s
        event: drafter.Proposed | target.Computed
        if isinstance(action, drafter.Compute):
            event = self.world.models.draft(action, digests[-1], round(cost_s * 1e6))
        else:
            asked = digests[num_rows - action.num_asked :]
            event = self.world.models.verify(action, asked, round(cost_s * 1e6))
        self.ticket = action.ticket
        self.num_outstanding += 1
        self.world.judge.launched(self, action)
        self._later(self._busy_until - now, lambda: self._finish(event))

    def _finish(self, event: drafter.Proposed | target.Computed) -> None:
        self.num_outstanding -= 1
        self.progress += 1
        if event.ticket == self.ticket:
            self.ticket = 0
        self._handle(event)
        self._drain()

    def _wake(self) -> None:
        if self.world.timeline.now >= self.deadline and not (
            self.world.scenario.blocking and self.num_outstanding
        ):
            self._tick()

    def _beat(self) -> None:
        mark = self.machine.mark
        beat = Heartbeat(() if mark is None else (mark,), self.progress, "")
        self.world.uplinks[self.role].send(codec.encode(beat))
        self._later(HEARTBEAT_INTERVAL_S, self._beat)

    def _later(self, delay_s: float, happen: Callable[[], None]) -> None:
        life = self.life

        def if_still_alive() -> None:
            if self.alive and self.life == life:
                happen()

        self.world.timeline.at(self.world.timeline.now + delay_s, if_still_alive)


class Host:
    """The coordinator's loop: forwards frames, and gives the session its events."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.session: coordination.Session | None = None
        self.present: set[Role] = set()
        self.num_texts = 0  # begun
        self._progress: dict[Role, int] = {}

    def begin(self) -> None:
        """Start the next text, or end the world."""
        texts = self.world.scenario.texts
        if self.num_texts == len(texts):
            self.session = None
            self.world.over = True
            return
        text = texts[self.num_texts]
        self.num_texts += 1
        key = self.world.random.randbytes(CACHE_KEY_BYTES)
        self.session = coordination.Session(
            self.num_texts,
            key,
            text.prompt,
            sampling=SamplingSpec(temperature=self.world.scenario.temperature, seed=self.num_texts),
            policy=self.world.scenario.policy,
            limits=text.limits,
            rule=self.world.scenario.rule,
            lookup=self.world.scenario.lookup,
        )
        self.world.judge.begun(self.session, text)
        self.handle(coordination.Started())
        for role in sorted(self.present):
            self.handle(coordination.NodeJoined(role.encode(), role))

    def joined(self, role: Role) -> None:
        """A node has introduced itself."""
        self.present.add(role)
        self.world.judge.disturbed()
        self.handle(coordination.NodeJoined(role.encode(), role))

    def lost(self, role: Role) -> None:
        """A node has been silent for too long."""
        self.present.discard(role)
        self.world.judge.disturbed()
        self.handle(coordination.NodeLost(role.encode(), role))

    def receive(self, role: Role, frame: bytes) -> None:
        """Forward before anything else; then see what it means for the session."""
        kind = codec.kind_of(frame)
        if kind is Draft and Role.TARGET in self.present:
            self.world.downlinks[Role.TARGET].send(frame)
        if kind is Verdict and Role.DRAFTER in self.present:
            self.world.downlinks[Role.DRAFTER].send(frame)
        match codec.decode(frame):
            case Verdict() as verdict if self._is_current(verdict.session):
                self.handle(coordination.VerdictArrived(verdict))
            case Fault() as fault if self._is_current(fault.session):
                self.handle(coordination.FaultArrived(role.encode(), fault))
            case Heartbeat(progress=progress) if role is Role.TARGET:
                if progress != self._progress.get(role):
                    self._progress[role] = progress
                    self.handle(coordination.Progressed())
            case _:
                pass

    def _is_current(self, session: int) -> bool:
        return self.session is not None and self.session.session == session

    def beat(self) -> None:
        """Tell both nodes how far the texts are, and let the session look at the time."""
        open_text = self.session is not None and not self.session.ended
        marks: tuple[SessionMark, ...] = (self.session.mark,) if open_text and self.session else ()
        for role in sorted(self.present):
            self.world.downlinks[role].send(codec.encode(Heartbeat(marks, 0, "")))
        self.handle(coordination.Tick())
        self.world.timeline.at(self.world.timeline.now + HEARTBEAT_INTERVAL_S, self.beat)

    def handle(self, event: coordination.Event) -> None:
        """Give the session an event and do what it asks for."""
        if self.session is None:
            return
        actions = self.session.handle(event, self.world.timeline.now)
        self.world.tell("session", "handles", event)
        for action in actions:
            self.world.tell("session", "does", action)
            self.world.judge.session_did(self.session, action)
            match action:
                case coordination.Send(node, message):
                    role = Role(node.decode())
                    if role in self.present:
                        self.world.downlinks[role].send(codec.encode(message))
                case coordination.Finish():
                    self.world.timeline.at(self.world.timeline.now + 0.01, self.begin)
                case _:
                    pass


class World:
    """One run of one scenario."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        tell: Callable[[Line], None] | None = None,
        models: Models | None = None,
        make_judge: Callable[[Scenario, Timeline], Any] = Judge,
    ) -> None:
        self.scenario = scenario
        self.models = models or Deterministic(scenario.model)
        self.random = Random(f"world {scenario.seed}")
        self.timeline = Timeline()
        self.story: deque[Line] = deque(maxlen=STORY_LEN)
        self._tell = tell
        self.over = False
        costs = scenario.costs
        self.late_s = 4 * (costs.drafter_hop_s + costs.target_hop_s + costs.pass_s)
        self.nodes = {role: Node(self, role) for role in Role}
        self.host = Host(self)
        self.judge = make_judge(scenario, self.timeline)
        hops_s = {Role.DRAFTER: costs.drafter_hop_s, Role.TARGET: costs.target_hop_s}
        self.downlinks = {
            role: Link(self, f"-> {role}", hops_s[role], node.receive)
            for role, node in self.nodes.items()
        }
        self.uplinks = {
            role: Link(self, f"<- {role}", hops_s[role], self._receiver(role)) for role in Role
        }

    def _receiver(self, role: Role) -> Callable[[bytes], None]:
        return lambda frame: self.host.receive(role, frame)

    def run(self) -> None:
        """Everything, until the last text is complete or the judge has had enough."""
        for role, node in self.nodes.items():
            node.start()
            self.host.present.add(role)
        for crash in self.scenario.faults.crashes:
            self.timeline.at(crash.at_s, partial(self._crash, crash.role, crash.down_s))
        self.host.begin()
        self.host.beat()
        while not self.over:
            self.timeline.step()
            self.judge.watch_clock()
        self.judge.ended()

    def _crash(self, role: Role, down_s: float) -> None:
        node = self.nodes[role]
        if not node.alive:
            return
        self.tell(str(role), "dies", "")
        node.crash()
        life, detect_s = node.life, self.scenario.costs.detect_s
        now = self.timeline.now

        def notice() -> None:
            if not node.alive:
                self.host.lost(role)

        def come_back() -> None:
            node.start()
            assert node.life == life + 1
            self.timeline.at(self.timeline.now + detect_s, lambda: self.host.joined(role))

        self.timeline.at(now + detect_s, notice)
        self.timeline.at(now + down_s, come_back)

    def tell(self, who: str, verb: str, what: Any) -> None:
        """Add to the story."""
        line = Line(self.timeline.now, who, verb, what)
        self.story.append(line)
        if self._tell is not None:
            self._tell(line)
