"""Texts and the room for them: who is open, who waits, and who gets a lane that is free again."""

import random

import pytest

from coordinator.cluster.router_events import (
    Action,
    Arrived,
    NodeEnded,
    Send,
    TextLeft,
    TextSubmitted,
)
from coordinator.cluster.routing import Router
from coordinator.text.session_events import NodeId
from proto.codec import decode
from proto.messages import Heartbeat, Open, Role, Rule
from tests.coordinator.cluster.routers import (
    FIRST,
    SECOND,
    TARGET,
    begun,
    closed,
    join,
    opened,
    router_of,
    text,
)

OTHER = b"target-2"


def told(actions: list[Action]) -> list[tuple[NodeId, int]]:
    """Who is told of which texts."""
    sent = [(action.node, decode(action.frame)) for action in actions if isinstance(action, Send)]
    return [(node, message.session) for node, message in sent if isinstance(message, Open)]


def ended(node: NodeId) -> NodeEnded:
    return NodeEnded(node, "it has died", is_unusable=False)


def left(session: int) -> TextLeft:
    return TextLeft(session, is_complete=False)


def test_no_more_texts_are_open_than_the_target_has_room_for() -> None:
    router = router_of(FIRST, num_lanes=2, max_num_seqs=8)
    for session in (1, 2, 3, 4):
        begun(router, text(session))
        router.check()
    assert (router.sessions, router.queued) == ((1, 2), (3, 4))
    assert told(router.handle(left(1), 0.0)) == [(TARGET, 3), (FIRST, 3)]
    assert (router.sessions, router.queued) == ((2, 3), (4,))
    router.check()


def test_a_drafter_with_little_room_works_on_the_oldest_texts() -> None:
    router = router_of(max_num_seqs=3)
    join(router, FIRST, Role.DRAFTER, num_lanes=1)
    texts = [text(session) for session in (1, 2, 3)]
    actions = [action for one in texts for action in router.handle(TextSubmitted(one), 0.0)]
    assert told(actions) == [(TARGET, 1), (FIRST, 1), (TARGET, 2), (TARGET, 3)]
    actions = router.handle(left(1), 0.0)
    assert actions[:2] == [closed(TARGET, "cancelled", 1), closed(FIRST, "cancelled", 1)]
    assert actions[3:] == [opened(FIRST, 1, 2, session=2, incarnation=2)]
    assert told(router.handle(left(3), 0.0)) == [], "it had none of its lanes"
    router.check()
    assert texts[1].machine.drafter_lost_at is None, "there was no room, and nothing was lost"


def test_a_text_whose_drafter_is_lost_gets_another_that_has_room() -> None:
    router = router_of(max_num_seqs=3)
    join(router, FIRST, Role.DRAFTER, num_lanes=2)
    join(router, SECOND, Role.DRAFTER, num_lanes=1)
    for session in (1, 2, 3):
        begun(router, text(session, rule=Rule.TOKEN))
    assert told(router.handle(ended(FIRST), 0.0)) == [], "the other works on the second"
    router.check()
    assert told(router.handle(left(2), 0.0)) == [(SECOND, 1)]
    router.check()


def test_a_new_target_with_less_room_takes_the_oldest_texts_and_the_others_wait() -> None:
    router = router_of(FIRST, max_num_seqs=3, awaits_target=True)
    for session in (1, 2, 3, 4):
        begun(router, text(session))
    router.handle(ended(TARGET), 0.0)
    router.check()
    assert told(join(router, OTHER, Role.TARGET, num_lanes=2)) == [(OTHER, 1), (OTHER, 2)]
    router.check()
    assert told(router.handle(left(1), 0.0)) == [(OTHER, 3)]
    assert (router.sessions, router.queued) == ((2, 3), (4,))
    assert told(router.handle(left(2), 0.0)) == [(OTHER, 4), (FIRST, 4)]
    router.check()


def test_without_a_target_no_text_begins() -> None:
    router = router_of(FIRST, max_num_seqs=2, awaits_target=True)
    begun(router, text(1))
    router.handle(ended(TARGET), 0.0)
    begun(router, text(2))
    router.check()
    assert (router.sessions, router.queued) == ((1,), (2,))
    joined = join(router, OTHER, Role.TARGET)
    assert told(joined) == [(OTHER, 1), (OTHER, 2), (FIRST, 2)]
    router.check()


class Life:
    """A router to which random things happen; texts begin in order, and each is served."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.router = Router("secret", max_num_seqs=self.random.randint(1, 4), awaits_target=True)
        self.num_nodes = self.num_texts = 0
        self.begun: list[int] = []

    def happen(self) -> None:
        """One thing, after which every invariant holds."""
        nodes = [node.id for node in self.router.registry.nodes if node.hello is not None]
        sessions = (*self.router.sessions, *self.router.queued)
        match self.random.randrange(6):
            case 0 | 1:
                self.submit()
            case 2 if sessions:
                self.router.handle(left(self.random.choice(sessions)), 0.0)
            case 3:
                self.start(self.random.choice(list(Role)))
            case 4 if nodes:
                self.router.handle(ended(self.random.choice(nodes)), 0.0)
            case 5 if nodes:
                self.router.handle(Arrived(nodes[-1], Heartbeat((), 0, "")), 0.0)
        self.look()

    def submit(self) -> None:
        """A text under a rule that is drawn."""
        self.num_texts += 1
        rule = self.random.choice((Rule.COUPLED, Rule.TOKEN))
        self.router.handle(TextSubmitted(text(self.num_texts, rule=rule)), 0.0)

    def start(self, role: Role) -> None:
        """A node with few lanes; a target only where there is none."""
        if role is Role.TARGET and self.router.registry.ready(role):
            return
        self.num_nodes += 1
        lanes = self.random.randint(1, 3)
        join(self.router, b"node-%d" % self.num_nodes, role, num_lanes=lanes)

    def look(self) -> None:
        """Every invariant holds, and nobody is before an older one."""
        self.router.check()
        self.begun += [one for one in self.router.sessions if one not in self.begun]
        assert self.begun == sorted(self.begun)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_and_goes_every_text_gets_its_turn(seed: int) -> None:
    life = Life(seed)
    for _ in range(100):
        life.happen()
    life.start(Role.TARGET)
    life.look()
    assert life.num_texts > 0
    while life.router.sessions:
        life.router.handle(left(life.router.sessions[0]), 0.0)
        life.look()
    assert life.router.queued == ()
