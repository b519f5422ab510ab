"""Bad links and nodes that die around the real machines (`rehearsal.world`).

Nothing here decides anything about a text; the judge is told what happened.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from proto.messages import Role
from rehearsal import world
from rehearsal.node import SimulatedNode, name_of
from rehearsal.timeline import Timeline
from tests.simulation.deaths import MortalHost
from tests.simulation.judge import Judge
from tests.simulation.models import models_of
from tests.simulation.scenario import Scenario
from tests.simulation.story import Line

STORY_LEN = 60


class BadLink:
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
        if (healed_s := self._cut_until()) is not None:
            # As over TCP: what was sent meanwhile comes afterwards, and in order.
            arrival = self._last_arrival = max(self._last_arrival, healed_s + hop_s)
            mark = True
        elif late:
            arrival = timeline.now + hop_s + random.random() * self.world.late_s
        else:
            arrival = self._last_arrival = max(self._last_arrival, timeline.now + hop_s)

        def arrive() -> None:
            if mark:
                self.world.judge.disturbed()
            self.world.tell(self.name, "arrives", frame)
            self.deliver(frame)

        timeline.at(arrival, arrive)

    def _cut_until(self) -> float | None:
        """When the node at the other end can be reached again; None: it can be."""
        for cut in self.world.scenario.faults.cuts:
            is_its_own = self.name.endswith(name_of(Role.TARGET, cut.index))
            if is_its_own and cut.at_s <= self.world.timeline.now < cut.at_s + cut.lasts_s:
                return cut.at_s + cut.lasts_s
        return None


class World:
    """One run of one scenario."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        tell: Callable[[Line], None] | None = None,
        models: world.Models | None = None,
        make_judge: Callable[[Scenario, Timeline], Any] = Judge,
    ) -> None:
        self.scenario = scenario
        self.random = Random(f"world {scenario.seed}")
        self.timeline = Timeline()
        self.story: deque[Line] = deque(maxlen=STORY_LEN)
        self._tell = tell
        costs = scenario.costs
        self.late_s = 4 * (costs.drafter_hop_s + costs.target_hop_s + costs.pass_s)
        self.judge = make_judge(scenario, self.timeline)
        self._machines = world.World(
            scenario.setting,
            models or models_of(scenario),
            self.timeline,
            self.judge,
            self.random,
            make_link=partial(BadLink, self),
            tell=self.tell,
            make_host=self._make_host,
        )

    def _make_host(self, machines: world.World) -> world.Host:
        return MortalHost(machines, self) if self.scenario.faults.deaths else world.Host(machines)

    def run(self) -> None:
        """Everything, until the last text is complete or the judge has had enough."""
        self._machines.begin()
        for crash in self.scenario.faults.crashes:
            nodes = self._machines.nodes
            node = next(n for n in nodes if (n.role, n.index) == (crash.role, crash.index))
            self.timeline.at(crash.at_s, partial(self._crash, node, crash.down_s))
        for cut in self.scenario.faults.cuts:
            self.timeline.at(cut.at_s + cut.lasts_s, self.judge.disturbed)
        for death in self.scenario.faults.deaths:
            host = self._machines.host
            assert isinstance(host, MortalHost)
            self.timeline.at(death.at_s, host.die)
            self.timeline.at(death.at_s + death.down_s, host.come_back)
        self._machines.run()

    def start(self, node: SimulatedNode) -> None:
        """Start a node's process, which joins after a while."""
        self._machines.launch(node)
        life, host = node.life, self._machines.host

        def greet() -> None:
            if node.life == life and not node.alive:
                host.greet(node)

        self.timeline.at(self.timeline.now + self.scenario.costs.detect_s, greet)

    def _crash(self, node: SimulatedNode, down_s: float) -> None:
        if not node.alive:
            return
        self.tell(node.name, "dies", "")
        node.crash()
        now, detect_s, life = self.timeline.now, self.scenario.costs.detect_s, node.life
        host = self._machines.host

        def come_back() -> None:
            if node.life == life:  # else a new coordinator has started it
                self.start(node)

        self.timeline.at(now + detect_s, partial(host.ended, node.id))
        self.timeline.at(now + down_s, come_back)

    def tell(self, who: str, verb: str, what: Any) -> None:
        """Add to the story."""
        line = Line(self.timeline.now, who, verb, what)
        self.story.append(line)
        if self._tell is not None:
            self._tell(line)
