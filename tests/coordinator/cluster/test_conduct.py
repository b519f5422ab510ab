"""Nodes that break the terms of their texts are told, and a drafter that goes on is cut off."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.cluster.conduct import FORGIVEN_S, MOST_DRAFTS, TELL_EVERY_S
from coordinator.cluster.node import Health
from coordinator.cluster.router_events import Action, Arrived, Deliver, Outside, Send, Tick, Warn
from coordinator.cluster.routing import Router
from coordinator.text.session_events import NodeId
from proto.codec import decode, encode
from proto.errors import OutsideError
from proto.liveness import HEARTBEAT_INTERVAL_S, MAX_BAD_FRAMES
from proto.messages import Draft, Fault, FaultCode, Heartbeat, Message, Role, SessionMark, Verdict
from tests.coordinator.cluster.routers import (
    FIRST,
    NUM_IDS,
    SECOND,
    TARGET,
    begun,
    own,
    router_of,
    said,
    text,
)
from tests.coordinator.test_behaviours import hello
from tests.texts import draft, verdict

NONSENSE = replace(verdict((1, 2), NUM_IDS), incarnation=1)
REASON = f"Verdict with token {NUM_IDS}: ids must be below {NUM_IDS}"


def at_work(*drafters: NodeId) -> Router:
    """A router whose nodes write one text: the target was told first."""
    router = router_of(*drafters)
    begun(router, text())
    return router


def sends(actions: Iterable[Action]) -> list[tuple[NodeId, Message]]:
    """What nodes are told."""
    return [(one.node, decode(one.frame)) for one in actions if isinstance(one, Send)]


def warnings(actions: Iterable[Action]) -> list[str]:
    """What people are told."""
    return [one.line for one in actions if isinstance(one, Warn)]


def test_a_verdict_of_unknown_ids_is_dropped_its_sender_is_told_and_the_text_goes_on() -> None:
    router = at_work(FIRST)
    actions = router.handle(Arrived(TARGET, NONSENSE), 0.0)
    assert sends(actions) == [(TARGET, Fault(1, 0, FaultCode.OUTSIDE, REASON))]
    assert warnings(actions) == [f"dropped a message of the target: {REASON}"]
    assert any(isinstance(one, Deliver) for one in router.handle(Arrived(TARGET, said(3)), 0.1))
    assert router.registry.nodes[0].num_bad_frames == 1


def test_a_node_is_told_once_a_second_and_a_target_is_never_cut_off() -> None:
    router = at_work(FIRST)
    told: list[float] = []
    now = 0.0
    while now < FORGIVEN_S - 1.0:
        told += [now] * len(sends(router.handle(Arrived(TARGET, NONSENSE), now)))
        now += TELL_EVERY_S / 4
    assert told == [TELL_EVERY_S * number for number in range(MAX_BAD_FRAMES)]
    assert router.registry.nodes[0].health is Health.READY
    assert sends(router.handle(Arrived(TARGET, NONSENSE), FORGIVEN_S)), "it is told again"


def test_a_drafter_that_goes_on_is_cut_off_and_the_text_goes_on() -> None:
    router = at_work(FIRST)
    stray = Arrived(FIRST, said(3))  # a drafter says no verdicts
    actions: list[Action] = []
    for number in range(MAX_BAD_FRAMES):
        actions = router.handle(stray, number * TELL_EVERY_S)
        assert router.registry.nodes[1].health is Health.READY
    actions = router.handle(stray, MAX_BAD_FRAMES * TELL_EVERY_S)
    words = "keeps sending messages outside of their texts; the last: "
    words += "Verdict with no place in what a drafter sends"
    assert sends(actions) == [(FIRST, Fault(0, 0, FaultCode.REFUSED, f"it {words}"))]
    assert warnings(actions) == [f"the drafter {words}; going on without drafts"]
    assert router.registry.nodes[1].health is Health.GONE
    assert any(isinstance(one, Deliver) for one in router.handle(Arrived(TARGET, said(3)), 9.0))


@pytest.mark.parametrize(
    ("node", "message", "words"),
    [
        (FIRST, draft((1, 2), 3, incarnation=1), "incarnation 1, of which it was not told"),
        (FIRST, draft((1, 2), 3, incarnation=3), "incarnation 3, of which it was not told"),
        (FIRST, draft((1, 2), 3, incarnation=9), "incarnation 9, of which it was not told"),
        (FIRST, replace(draft((1, 2), 3, incarnation=2), source=2), "source 2, which is not its"),
        (TARGET, replace(said(3), incarnation=2), "incarnation 2, of which it was not told"),
    ],
)
def test_a_frame_with_anothers_life_or_source_is_not_passed_on(
    node: NodeId, message: Message, words: str
) -> None:
    router = at_work(FIRST, SECOND)
    with pytest.raises(OutsideError, match=words):
        router.forward(node, type(message), encode(message), 0.0)
    actions = router.handle(Outside(node, 1, words), 0.0)
    assert sends(actions) == [(node, Fault(1, 0, FaultCode.OUTSIDE, words))]


@pytest.mark.parametrize(
    ("node", "message", "words"),
    [
        (FIRST, Heartbeat((SessionMark(1, 1, 2, 7),), 1, ""), "incarnation 1, of which it was not"),
        (TARGET, Heartbeat((SessionMark(1, 1, 41, 7),), 1, ""), "a text of 41 tokens"),
        (FIRST, Fault(1, 1, FaultCode.GAP, ""), "incarnation 1, of which it was not told"),
        (FIRST, replace(hello(Role.DRAFTER), version=1), "a second Hello, which differs"),
        (FIRST, hello(Role.TARGET), "a second Hello, which differs"),
    ],
)
def test_marks_faults_and_introductions_are_their_senders_own(
    node: NodeId, message: Message, words: str
) -> None:
    router = at_work(FIRST)
    (told,) = sends(router.handle(Arrived(node, message), 0.0))
    assert told[0] == node
    assert isinstance(told[1], Fault)
    assert words in told[1].detail
    assert router.sessions == (1,)


def test_a_complaint_of_the_target_is_told_to_the_drafter_whose_draft_it_was() -> None:
    router = at_work(FIRST, SECOND)
    complaint = Fault(1, 3, FaultCode.OUTSIDE, "Draft with token 999")
    actions = router.handle(Arrived(TARGET, complaint), 0.0)
    line = "Draft with token 999 (found by the target)"
    assert sends(actions) == [(SECOND, Fault(1, 0, FaultCode.OUTSIDE, line))]
    assert router.handle(Arrived(TARGET, replace(complaint, incarnation=8)), 0.0) == []


def test_a_frame_that_comes_again_is_not_passed_on_again() -> None:
    router = at_work(FIRST)
    first, second = (encode(own(router, FIRST, draft((1, 2), 3, number=n))) for n in (1, 2))
    passed = [router.forward(FIRST, Draft, one, 0.0) for one in (first, first, second, second)]
    assert passed == [(TARGET,), None, (TARGET,), None]


def flood(router: Router, count: int, start: int = 1) -> list[Any]:
    """So many drafts of the first drafter, no two of them equal; what is passed on."""
    numbers = range(start, start + count)
    frames = (encode(own(router, FIRST, draft((1, 2), 3, number=number))) for number in numbers)
    return [router.forward(FIRST, Draft, frame, 0.0) for frame in frames]


def test_a_drafter_that_sends_more_than_any_text_can_use_is_cut_off_at_once() -> None:
    router = at_work(FIRST)
    assert all(flood(router, MOST_DRAFTS))
    router.handle(Tick(), 0.0)
    assert router.registry.nodes[1].health is Health.READY, "as many as that may be honest"
    passed = flood(router, MOST_DRAFTS + 1)
    assert not passed[-1]
    assert "sends more than 1024 drafts at once" in str(router.handle(Tick(), 0.05))
    assert router.registry.nodes[1].health is Health.GONE
    assert any(isinstance(one, Deliver) for one in router.handle(Arrived(TARGET, said(3)), 0.1))


def test_what_may_be_sent_is_counted_anew_with_each_heartbeat() -> None:
    router = at_work(FIRST)
    for number in range(4):
        assert all(flood(router, MOST_DRAFTS, 1 + number * MOST_DRAFTS))
        router.handle(Tick(), (1 + number) * HEARTBEAT_INTERVAL_S)
    assert router.registry.nodes[1].health is Health.READY


def test_verdicts_do_not_make_room_for_more() -> None:
    router = at_work(FIRST)
    for number in range(1 + MOST_DRAFTS // 100):
        flood(router, 100, 1 + 100 * number)
        router.forward(TARGET, Verdict, encode(said(3)), 0.0)
    router.handle(Tick(), 0.05)
    assert router.registry.nodes[1].health is Health.GONE
