"""Drafters that are heads: what they read, who hands it out, and which of them fit."""

from dataclasses import replace

import pytest

from coordinator.cluster.router_events import (
    UNREAD,
    Abort,
    Action,
    Arrived,
    Send,
    TextSubmitted,
    Tick,
)
from coordinator.cluster.routing import Router
from coordinator.text.session_events import NodeId
from proto.codec import decode, encode
from proto.liveness import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S
from proto.messages import Draft, Fault, Features, Hello, Role, Rule, Welcome
from tests.coordinator.cluster.routers import (
    FIRST,
    SECOND,
    TARGET,
    begun,
    forwarded,
    opened,
    said,
    text,
)
from tests.coordinator.test_behaviours import hello
from tests.policies import autoregressive
from tests.texts import name

LAST, THREE = (-1,), (2, 4, 5)
NEWS = Features(1, 1, 2, name(1, 2), 1, "float32", bytes(32))


def told(role: Role, *, layers: tuple[int, ...] = (), hidden_size: int = 8) -> Hello:
    """How a target of eight layers introduces itself, or a head."""
    num_layers = 8 if role is Role.TARGET else 0
    return replace(hello(role), layers=layers, hidden_size=hidden_size, num_layers=num_layers)


def met(*drafters: NodeId, layers: tuple[int, ...] = LAST) -> Router:
    """A router with a target and drafters that are heads."""
    router = Router("secret")
    joins(router, TARGET, told(Role.TARGET))
    for node in drafters:
        joins(router, node, told(Role.DRAFTER, layers=layers))
    return router


def joins(router: Router, node: NodeId, introduction: Hello) -> list[Action]:
    """A process is started and introduces itself."""
    router.registry.expect(introduction.role, node, 0.0)
    return router.handle(Arrived(node, introduction), 0.0)


def test_features_go_to_the_heads_of_the_text_and_to_no_other_drafter() -> None:
    router = met(FIRST)
    joins(router, SECOND, told(Role.DRAFTER))
    begun(router, text())
    assert forwarded(router, TARGET, NEWS) == (FIRST,)
    assert forwarded(router, TARGET, said(3)) == (FIRST, SECOND)
    assert forwarded(router, FIRST, NEWS) == (), "no target has said that"
    assert forwarded(router, TARGET, replace(NEWS, session=2)) == (), "there is no such text"


def test_they_are_never_read_whatever_is_in_them() -> None:
    router = met(FIRST)
    begun(router, text())
    garbled = encode(NEWS)[:-20]
    assert router.forward(TARGET, Features, garbled, 0.0) == (FIRST,)
    assert set(UNREAD) == {Draft, Features}


def test_a_target_that_hands_out_features_is_not_silent() -> None:
    router = met(FIRST)
    begun(router, text())
    now = 0.0
    while now < 6 * SILENCE_LIMIT_S:
        now += HEARTBEAT_INTERVAL_S
        forwarded(router, TARGET, NEWS, now)
        assert not [one for one in router.handle(Tick(), now) if isinstance(one, Abort)]
    assert forwarded(router, TARGET, NEWS, now) == (), "the drafter is"


def test_the_target_is_told_of_the_layers_as_the_text_begins() -> None:
    router = met(FIRST)
    assert router.handle(TextSubmitted(text()), 0.0) == [
        opened(TARGET, 1, 2, incarnation=1, layers=LAST),
        opened(FIRST, 1, 2, incarnation=2),
    ]


def test_a_head_that_joins_later_makes_the_target_begin_anew_once() -> None:
    router = met()
    running = begun(router, text())
    welcome, *told_ones = joins(router, FIRST, told(Role.DRAFTER, layers=THREE))
    assert welcome == Send(FIRST, encode(Welcome(100, 0)))
    assert told_ones == [
        opened(TARGET, 1, 2, incarnation=2, layers=THREE),
        opened(FIRST, 1, 2, incarnation=3),
    ]
    _, *told_ones = joins(router, SECOND, told(Role.DRAFTER, layers=THREE))
    assert told_ones == [opened(SECOND, 1, 2, incarnation=4)]
    assert running.machine.counts.num_reopened == 0


def test_nobody_hands_out_features_to_a_drafter_that_works_on_other_texts() -> None:
    router = Router("secret", max_num_seqs=2)
    joins(router, TARGET, told(Role.TARGET))
    joins(router, FIRST, replace(told(Role.DRAFTER, layers=LAST), num_lanes=1))
    begun(router, text())
    assert router.handle(TextSubmitted(text(2)), 0.0) == [
        opened(TARGET, 1, 2, session=2, incarnation=1)
    ]
    alone = met(FIRST)
    assert alone.handle(TextSubmitted(text(policy=autoregressive())), 0.0) == [
        opened(TARGET, 1, 2, incarnation=1, policy=autoregressive())
    ]


def test_under_a_classical_rule_the_head_is_told_the_attempt_that_begins_with_it() -> None:
    router = met()
    begun(router, text(rule=Rule.TOKEN))
    _, target, head = joins(router, FIRST, told(Role.DRAFTER, layers=LAST))
    attempts = []
    for action in (target, head):
        assert isinstance(action, Send)
        message = decode(action.frame)
        attempts.append(getattr(message, "attempt", None))
    assert attempts[0] == attempts[1] != 0


@pytest.mark.parametrize(
    ("head", "line"),
    [
        (
            told(Role.DRAFTER, layers=LAST, hidden_size=16),
            "the drafter is a head for targets whose hidden size is 16, and this one's is 8; "
            "choose the head that was made for this target",
        ),
        (
            told(Role.DRAFTER, layers=(2, 8, 5)),
            "the drafter is a head that reads features of layers 2, 8, 5, and the target has 8 "
            "layers; choose the head that was made for this target",
        ),
        (
            told(Role.DRAFTER, layers=LAST),
            "drafter-2 reads features of layers -1, drafter-1 of layers 2, 4, 5; a target hands "
            "out those of one kind of heads",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(head: Hello, line: str) -> None:
    router = met(FIRST, layers=THREE)
    refusal, abort = joins(router, SECOND, head)
    assert isinstance(refusal, Send)
    fault = decode(refusal.frame)
    assert isinstance(fault, Fault)
    assert fault.detail == line
    assert isinstance(abort, Abort)


def test_a_target_that_comes_after_its_head_is_held_to_it() -> None:
    router = Router("secret")
    joins(router, FIRST, told(Role.DRAFTER, layers=LAST, hidden_size=16))
    refusal, abort = joins(router, TARGET, told(Role.TARGET))
    assert isinstance(refusal, Send)
    assert isinstance(decode(refusal.frame), Fault)
    assert isinstance(abort, Abort)
    assert "is a head for targets whose hidden size is 16" in str(abort.error)


def test_a_draft_model_beside_a_head_has_no_layers_to_differ_in() -> None:
    router = met(FIRST, layers=THREE)
    (welcome,) = joins(router, SECOND, told(Role.DRAFTER, hidden_size=99))
    assert welcome == Send(SECOND, encode(Welcome(100, 2)))
