"""Messages that break the terms of their text end nobody, and change no text.

In the simulator: they are of every kind, with every field changed, of a drafter and of a target.
"""

from collections import Counter
from typing import Any

import pytest

from coordinator.text.session_events import Emit
from node.entrance import Entrance
from node.events import Arrived
from proto.codec import decode, encode
from proto.messages import Role
from proto.terms import SENT_BY
from rehearsal.node import SimulatedNode
from rehearsal.setting import VOCABULARY
from rehearsal.world import Host
from tests.hostile.outside import ALL_FIELDS, Attacker, Key
from tests.simulation.run import draw
from tests.simulation.world import World

EACH = 12  # messages for each field
SEEDS = 6  # scenarios at least, with several policies and rules, and with heads
MOST_SEEDS = 30  # where chance has put a field into its range each time, there are more scenarios
# Fields without a range of their own. What they say is ignored, shown to people, or costs speed.
FREE = {
    *("Draft.session", "Verdict.session", "Features.session", "PromptLogprobs.session"),
    *("Draft.parent_hash", "Verdict.base_hash", "Features.end_hash", "Heartbeat.marks.path_hash"),
    *("Draft.number", "Draft.done", "Draft.scores", "Draft.parents", "Draft.proposals"),
    *("Draft.attempt", "Draft.proposals.probs"),
    *("Verdict.acks", "Verdict.acks.source", "Verdict.acks.incarnation", "Verdict.acks.number"),
    *("Verdict.cause", "Verdict.hit", "Verdict.least_chance", "Verdict.sources"),
    *("Fault.session", "Fault.detail"),
    *("Heartbeat.marks", "Heartbeat.marks.session", "Heartbeat.progress", "Heartbeat.state"),
    "Heartbeat.pass_expected_us",  # counts up to EXPECTED_S_MAX
    "Verdict.num_accepted",  # the codec compares it with num_drafted, so that few values are left
    *("Heartbeat.clock_us", "Heartbeat.num_overruns", "Heartbeat.num_uncaptured"),
    *("TracePart.number", "TracePart.num_dropped", "TracePart.records"),
}


class Reader:
    """Watches a run, and keeps the texts alone."""

    def __init__(self, scenario: Any, timeline: Any) -> None:
        self.texts: dict[int, list[int]] = {}
        self.over: set[int] = set()

    def delivered(self, session: int, item: Any) -> None:
        """Keep the tokens."""
        if isinstance(item, Emit):
            self.texts.setdefault(session, []).extend(item.tokens)

    def completed(self, session: int, result: Any) -> None:
        """It has been told so."""
        self.over.add(session)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None


class Attack:
    """Sends an attacker's messages along with those of the nodes of one role.

    made        whose messages these frames are
    at_router, at_node  messages that came there, by kind and field
    refused     those that were dropped as outside of their text
    """

    def __init__(self, role: Role, seed: int, per_frame: int) -> None:
        self.role = role
        self.attacker = Attacker(role, VOCABULARY, seed)
        self.per_frame = per_frame
        self.made: dict[bytes, Key] = {}
        self.at_router: Counter[Any] = Counter()
        self.at_node: Counter[Any] = Counter()
        self.refused: Counter[Any] = Counter()

    @property
    def unchecked(self) -> set[str]:
        """The fields that were never refused, whatever they were."""
        sent = {kind.__name__ for kind in SENT_BY[self.role]}
        never = (key for key in self.attacker.made if key[0] in sent and not self.refused[key])
        return {f"{kind}.{'.'.join(path)}" for kind, path in never}

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """From now on, in the simulator."""
        receive, handle = Host.receive, Entrance.handle
        self.attacker.forget()

        def attacked(host: Host, node_id: bytes, frame: bytes) -> None:
            node = next((one for one in host.world.nodes if one.id == node_id), None)
            if node is not None and node.role is self.role:
                self.attacker.saw(node_id, decode(frame))
                for _ in range(self.per_frame):
                    self._send(host, node, receive)
            receive(host, node_id, frame)

        def let_in(entrance: Entrance[Any, Any], event: Any, now: float) -> Any:
            key = self.made.get(encode(event.message)) if isinstance(event, Arrived) else None
            before = entrance.num_dropped
            actions = handle(entrance, event, now)
            if key is not None:
                self.at_node[key] += 1
                self.refused[key] += entrance.num_dropped - before
            return actions

        patch.setattr(Host, "receive", attacked)
        patch.setattr(Entrance, "handle", let_in)

    def _send(self, host: Host, node: SimulatedNode, receive: Any) -> None:
        message = self.attacker.next(node.id)
        if message is None:
            return
        frame = encode(message)
        key = self.made[frame] = self.attacker.last
        found = host.router.registry.find(node.id)
        before = 0 if found is None else found.num_bad_frames
        receive(host, node.id, frame)
        self.at_router[key] += 1
        if found is not None:
            self.refused[key] += found.num_bad_frames - before


def read(seed: int, **how: Any) -> dict[int, list[int]]:
    """The texts of a scenario."""
    world = World(draw(seed, **how), make_judge=Reader)
    world.run()
    reader = world.judge
    assert len(reader.over) == len(reader.texts)
    return reader.texts


@pytest.mark.parametrize("role", list(Role))
def test_nobody_ends_and_no_text_changes(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = Attack(role, 1, 3)
    for seed in range(MOST_SEEDS):
        scenario = draw(seed)
        # Several targets are by hand: one that greets as another version is refused, ends, and
        # nobody here starts it again. Of a coordinator that dies, clients read what is kept.
        if scenario.num_targets > 1 or scenario.faults.deaths:
            continue
        honest = read(seed)
        with monkeypatch.context() as patch:
            attack.plant(patch)
            assert read(seed) == honest, f"seed {seed}"
        is_enough = seed + 1 >= SEEDS and attack.attacker.least >= EACH
        if is_enough and attack.unchecked <= FREE:
            break
    assert attack.attacker.least >= EACH
    assert attack.at_router.keys() >= ALL_FIELDS - attack.attacker.impossible
    assert attack.unchecked <= FREE
