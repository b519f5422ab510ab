"""Virtual time, bad links, and nodes that die: the machines' whole world.

Nothing here decides anything about a text. The world carries messages (every one through the
codec), runs forwards on toy caches, and tells the judge what happened.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from coordinator.text.session import NodeId
from drafter_node import events as drafter
from drafter_node import known as drafter_known
from drafter_node import scheduling as drafter_scheduling
from node.events import Allocate, Arrived, CopyPrefix, MoveRows, Send, Tick, WaitUntil
from node.follower import Follower
from node.lanes import Lanes
from proto import codec
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import Heartbeat, Message, Role, Welcome
from target_node import events as target
from target_node import known as target_known
from target_node import scheduling as target_scheduling
from tests.simulation.host import Host
from tests.simulation.judge import Judge
from tests.simulation.models import Deterministic, Models
from tests.simulation.scenario import Scenario
from tests.simulation.story import Line
from tests.simulation.timeline import Timeline
from tests.simulation.toys import CacheError, ToyCache

STORY_LEN = 60


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
    """A node process: its texts, their schedule, its device, and the loop around them.

    index  which of its role it is
    """

    def __init__(self, world: "World", role: Role, index: int = 0) -> None:
        self.world = world
        self.role = role
        self.index = index
        self.name = f"{role} {index + 1}" if index else str(role)
        self.life = 0  # of the process; things that an earlier life asked for do not happen
        self.alive = False
        self.follower: Any = None
        self.lanes: list[ToyCache] = []
        self.is_computing = False  # a result has not come yet
        self.deadline = float("inf")  # at which the schedule wants to be woken
        self.progress = 0  # finished forwards
        self._busy_until = 0.0
        self._inbox: deque[Message] = deque()

    @property
    def id(self) -> NodeId:
        """Of the process: every life has its own."""
        return f"{self.name}.{self.life}".encode()

    def start(self, source: int) -> None:
        """Begin a life with nothing but a source number."""
        scenario = self.world.scenario
        self.alive = True
        count = scenario.num_lanes(self.role)
        self.lanes = [ToyCache(scenario.capacity) for _ in range(count)]
        self.is_computing, self.progress = False, 0
        self.deadline = float("inf")
        self._busy_until = self.world.timeline.now
        self._inbox.clear()
        lanes = Lanes(count, scenario.capacity)
        together = min(count, scenario.num_per_pass)
        self.follower = Follower(lanes, self._schedule(lanes, source, together))
        self._later(HEARTBEAT_INTERVAL_S * self.world.random.random(), self._beat)

    def _schedule(self, lanes: Lanes, source: int, together: int) -> Any:
        scenario = self.world.scenario
        if self.role is Role.DRAFTER:
            reads = drafter_known.Known(scenario.drafter_max_len, source)
            return drafter_scheduling.Schedule(lanes, reads, num_per_pass=together)
        known = target_known.Known(scenario.fixed_rows)
        return target_scheduling.Schedule(lanes, known, num_per_pass=together)

    def crash(self) -> None:
        """End this life."""
        self.alive = False

    def receive(self, frame: bytes) -> None:
        """A frame has come."""
        if not self.alive:
            return
        self._inbox.append(codec.decode(frame))
        if not (self.world.scenario.blocking and self.is_computing):
            self._drain()

    def _drain(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            self._handle(Arrived(message))
        self._tick()

    def _tick(self) -> None:
        self.deadline = float("inf")
        self._handle(Tick())
        self.world.judge.rested(self)

    def _handle(self, event: Any) -> None:
        actions = self.follower.handle(event, self.world.timeline.now)
        self.world.tell(self.name, "handles", event)
        for action in actions:
            self._perform(action)
        self.world.judge.handled(self, event)

    def _perform(self, action: Any) -> None:
        self.world.tell(self.name, "does", action)
        match action:
            case Send(message):
                self.world.judge.sent(self, message)
                self.world.uplinks[self.id].send(codec.encode(message))
            case MoveRows(moves):
                for move in moves:
                    self.lanes[move.lane].move(move)
            case CopyPrefix(lane, to, length):
                self.lanes[to].copy(self.lanes[lane], length)
            case drafter.Compute() | target.Compute():
                self._compute(action)
            case WaitUntil(deadline):
                self.deadline = deadline
                self._later(deadline - self.world.timeline.now, self._wake)
            case Allocate():
                pass
            case _:
                raise AssertionError(f"unknown action {action}")

    def _compute(self, action: drafter.Compute | target.Compute) -> None:
        """The device works in order; the result comes when the time that it costs is over."""
        costs, now = self.world.scenario.costs, self.world.timeline.now
        if self.is_computing:
            raise CacheError("two forwards at once")
        self.world.judge.launched(self, action)
        digests = [self.lanes[part.feed.lane].run(part.feed) for part in action.parts]
        num_rows = sum(len(part.feed.tokens) for part in action.parts)
        cost_s = (num_rows - 1) * costs.row_s
        cost_s += costs.draft_s if self.role is Role.DRAFTER else costs.pass_s
        self._busy_until = max(self._busy_until, now) + cost_s
        models, model_us = self.world.models, round(cost_s * 1e6)
        event: drafter.Proposed | target.Computed
        if isinstance(action, drafter.Compute):
            pairs = zip(action.parts, digests, strict=True)
            children = tuple(models.draft(part, seen[-1], self.index) for part, seen in pairs)
            event = drafter.Proposed(action.ticket, children, model_us)
        else:
            outcomes = tuple(
                models.verify(part, seen[len(seen) - part.num_asked :])
                for part, seen in zip(action.parts, digests, strict=True)
            )
            event = target.Computed(action.ticket, outcomes, model_us)
        self.is_computing = True
        self._later(self._busy_until - now, lambda: self._finish(event))

    def _finish(self, event: drafter.Proposed | target.Computed) -> None:
        self.is_computing = False
        self.progress += 1
        self._handle(event)
        self._drain()

    def _wake(self) -> None:
        if self.world.timeline.now >= self.deadline and not (
            self.world.scenario.blocking and self.is_computing
        ):
            self._tick()

    def _beat(self) -> None:
        beat = Heartbeat(self.follower.marks, self.progress, "")
        self.world.uplinks[self.id].send(codec.encode(beat))
        self._later(HEARTBEAT_INTERVAL_S, self._beat)

    def _later(self, delay_s: float, happen: Callable[[], None]) -> None:
        life = self.life

        def if_still_alive() -> None:
            if self.alive and self.life == life:
                happen()

        self.world.timeline.at(self.world.timeline.now + delay_s, if_still_alive)


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
        self.nodes = [Node(self, Role.DRAFTER, index) for index in range(scenario.num_drafters)]
        self.nodes.append(Node(self, Role.TARGET))
        self.host = Host(self)
        self.judge = make_judge(scenario, self.timeline)
        # Every life of a node has links of its own: what was sent to it reaches no other.
        self.downlinks: dict[NodeId, Link] = {}
        self.uplinks: dict[NodeId, Link] = {}

    def run(self) -> None:
        """Everything, until the last text is complete or the judge has had enough."""
        for node in self.nodes:
            self._launch(node)
            self.host.greet(node.id, node.role)
        for crash in self.scenario.faults.crashes:
            node = next(n for n in self.nodes if (n.role, n.index) == (crash.role, crash.index))
            self.timeline.at(crash.at_s, partial(self._crash, node, crash.down_s))
        self.host.start()
        while not self.over:
            self.timeline.step()
            self.judge.watch_clock()
        self.judge.ended()

    def _launch(self, node: Node) -> None:
        """Start a process: a new life, that the coordinator expects."""
        node.life += 1
        node_id, costs = node.id, self.scenario.costs
        hop_s = costs.drafter_hop_s if node.role is Role.DRAFTER else costs.target_hop_s

        def deliver(frame: bytes) -> None:
            if node.id == node_id:
                node.receive(frame)

        receive = partial(self.host.receive, node_id)
        self.downlinks[node_id] = Link(self, f"-> {node.name}", hop_s, deliver)
        self.uplinks[node_id] = Link(self, f"<- {node.name}", hop_s, receive)
        self.host.expect(node_id, node.role)

    def welcome(self, node_id: NodeId, message: Message) -> None:
        """The coordinator has let a node in."""
        assert isinstance(message, Welcome)
        node = next(node for node in self.nodes if node.id == node_id)
        node.start(message.source)

    def _crash(self, node: Node, down_s: float) -> None:
        if not node.alive:
            return
        self.tell(node.name, "dies", "")
        node.crash()
        now, detect_s = self.timeline.now, self.scenario.costs.detect_s

        def come_back() -> None:
            self._launch(node)
            greet = partial(self.host.greet, node.id, node.role)
            self.timeline.at(self.timeline.now + detect_s, greet)

        self.timeline.at(now + detect_s, partial(self.host.ended, node.id))
        self.timeline.at(now + down_s, come_back)

    def tell(self, who: str, verb: str, what: Any) -> None:
        """Add to the story."""
        line = Line(self.timeline.now, who, verb, what)
        self.story.append(line)
        if self._tell is not None:
            self._tell(line)
