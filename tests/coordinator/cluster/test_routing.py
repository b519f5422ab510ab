"""Texts and frames: what goes where, from the beginning of a text to its end."""

from dataclasses import replace

import pytest

from coordinator.cluster.router_events import (
    Action,
    Arrived,
    Deliver,
    End,
    TextLeft,
    TextSubmitted,
    Tick,
)
from coordinator.text.session_events import Emit
from coordinator.text.timed_session import Result
from proto.errors import ClosedError, NodeError, TextError
from proto.liveness import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S
from proto.messages import (
    Fault,
    FaultCode,
    FinishReason,
    Heartbeat,
    Limits,
    SessionMark,
)
from tests.coordinator.cluster.routers import (
    FIRST,
    SECOND,
    TARGET,
    beat,
    begun,
    closed,
    forwarded,
    opened,
    router_of,
    said,
    text,
)
from tests.policies import autoregressive
from tests.texts import draft, name

# -- frames ---------------------------------------------------------------------------------------


def test_a_draft_goes_to_the_target_and_a_verdict_to_every_drafter() -> None:
    router = router_of(FIRST, SECOND)
    begun(router, text())
    assert forwarded(router, SECOND, draft((1, 2), 3)) == (TARGET,)
    assert forwarded(router, TARGET, said(3)) == (FIRST, SECOND)
    assert forwarded(router, FIRST, said(3)) == (), "no target has said that"
    assert forwarded(router, TARGET, draft((1, 2), 3)) == ()
    assert forwarded(router, TARGET, Heartbeat((), 0, "")) == ()


def test_what_is_said_of_a_text_that_has_ended_goes_nowhere() -> None:
    router = router_of(FIRST)
    begun(router, text())
    router.handle(TextLeft(1, is_complete=False), 0.0)
    begun(router, text(2))
    assert forwarded(router, FIRST, draft((1, 2), 3)) == ()
    assert forwarded(router, TARGET, said(3)) == ()
    assert router.handle(Arrived(TARGET, said(3)), 0.0) == []


def test_a_drafter_that_drafts_is_not_silent() -> None:
    router = router_of(FIRST)
    begun(router, text())
    now = 0.0
    while now < 2 * SILENCE_LIMIT_S:
        now += HEARTBEAT_INTERVAL_S
        forwarded(router, FIRST, draft((1, 2), 3), now)
        router.handle(Tick(), now)
    assert forwarded(router, TARGET, said(3), now) == (FIRST,)


# -- one text, from beginning to end --------------------------------------------------------------


def test_a_text_is_opened_written_and_closed() -> None:
    router = router_of(FIRST)
    running = text(limits=Limits(4, ()), submitted=1.0)
    assert router.handle(TextSubmitted(running), 1.5) == [
        opened(TARGET, 1, 2, incarnation=1, limits=Limits(4, ())),
        opened(FIRST, 1, 2, incarnation=2, limits=Limits(4, ())),
    ]
    first, end, *rest = router.handle(Arrived(TARGET, said(3, 4)), 2.0)
    assert first == Deliver(1, Emit((3, 4), 0, 0, ()))
    assert isinstance(end, End)
    assert isinstance(end.last, Result)
    assert end.last.reason is FinishReason.LENGTH
    assert (end.last.metrics.queued_s, end.last.metrics.elapsed_s) == (0.5, 0.5)
    assert rest == [closed(TARGET, "length"), closed(FIRST, "length")]
    assert router.sessions == ()


def test_what_the_policy_does_not_want_is_not_told() -> None:
    router = router_of(FIRST)
    actions = router.handle(TextSubmitted(text(policy=autoregressive())), 0.0)
    assert actions == [opened(TARGET, 1, 2, incarnation=1, policy=autoregressive())]
    assert forwarded(router, TARGET, said(3)) == ()
    mark = SessionMark(1, 1, 2, name(1, 2))
    assert router.handle(Tick(), 0.0) == [beat(FIRST), beat(TARGET, mark)]


def test_a_reader_that_leaves_ends_its_text() -> None:
    router = router_of(FIRST)
    begun(router, text())
    *told, end = router.handle(TextLeft(1, is_complete=False), 0.0)
    assert told == [closed(TARGET, "cancelled"), closed(FIRST, "cancelled")]
    assert isinstance(end, End)
    assert isinstance(end.last, ClosedError)
    assert router.handle(TextLeft(1, is_complete=False), 0.0) == []


def test_a_reader_that_has_found_the_end_gets_the_figures() -> None:
    router = router_of(FIRST)
    begun(router, text())
    router.handle(Arrived(TARGET, said(3)), 1.0)
    *told, end = router.handle(TextLeft(1, is_complete=True), 1.0)
    assert told == [closed(TARGET, "stop"), closed(FIRST, "stop")]
    assert isinstance(end, End)
    assert isinstance(end.last, Result)
    assert end.last.metrics.num_tokens == 1


# -- several texts --------------------------------------------------------------------------------


def test_the_oldest_text_that_waits_is_next() -> None:
    router = router_of(FIRST)
    for session in (1, 2, 3):
        begun(router, text(session))
    assert (router.sessions, router.queued) == ((1,), (2, 3))
    end, *rest = router.handle(TextLeft(1, is_complete=False), 0.0)[2:]
    assert isinstance(end, End)
    assert rest == [
        opened(TARGET, 1, 2, session=2, incarnation=1),
        opened(FIRST, 1, 2, session=2, incarnation=2),
    ]
    router.handle(TextLeft(3, is_complete=False), 0.0)
    assert (router.sessions, router.queued) == ((2,), ())


def test_several_texts_are_open_at_once_and_each_goes_its_own_way() -> None:
    router = router_of(FIRST, max_num_seqs=2)
    for session in (1, 2, 3):
        begun(router, text(session))
    assert (router.sessions, router.queued) == ((1, 2), (3,))
    assert router.handle(Arrived(TARGET, said(3, session=2)), 0.0) == [
        Deliver(2, Emit((3,), 0, 0, ()))
    ]
    marks = SessionMark(1, 2, 2, name(1, 2)), SessionMark(2, 2, 3, name(1, 2, 3))
    of_target = tuple(replace(mark, incarnation=1) for mark in marks)
    assert router.handle(Tick(), 0.0) == [beat(FIRST, *marks), beat(TARGET, *of_target)]
    assert forwarded(router, FIRST, replace(draft((1, 2), 3), session=2)) == (TARGET,)
    assert forwarded(router, FIRST, replace(draft((1, 2), 3), session=3)) == ()


def test_a_mistake_in_one_text_ends_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    router = router_of(FIRST, max_num_seqs=2)
    broken = begun(router, text(1))
    begun(router, text(2))
    mistake = KeyError("nothing")

    def wrong(*_: object) -> list[Action]:
        raise mistake

    monkeypatch.setattr(broken.machine.text, "continuation", wrong)
    *told, end = router.handle(Arrived(TARGET, said(3)), 0.0)
    assert told == [closed(TARGET, "failed"), closed(FIRST, "failed")]
    assert isinstance(end, End)
    assert isinstance(end.last, NodeError)
    assert end.last.__cause__ is mistake
    assert router.sessions == (2,)
    assert router.handle(Arrived(TARGET, said(3, session=2)), 0.0) == [
        Deliver(2, Emit((3,), 0, 0, ()))
    ]


def test_a_text_that_the_target_cannot_go_on_with_ends_alone() -> None:
    router = router_of(FIRST, max_num_seqs=2)
    for session in (1, 2, 3):
        begun(router, text(session))
    incarnation = 1  # the target is told first
    failed = Fault(1, incarnation, FaultCode.FAILED, "not finite at token position 7")
    actions = router.handle(Arrived(TARGET, failed), 0.1)
    (end,) = (action for action in actions if isinstance(action, End))
    assert end.session == 1
    assert isinstance(end.last, TextError)
    assert str(end.last) == "not finite at token position 7"
    assert {closed(TARGET, "failed"), closed(FIRST, "failed")} <= set(actions)
    assert router.sessions == (2, 3), "its place is free"
    assert router.handle(Arrived(TARGET, failed), 0.2) == [], "it may be said more than once"
    router.check()


@pytest.mark.parametrize(("node", "incarnation"), [(FIRST, 2), (FIRST, 1), (TARGET, 0)])
def test_only_the_target_that_is_there_ends_a_text(node: bytes, incarnation: int) -> None:
    router = router_of(FIRST)
    begun(router, text())
    failed = Fault(1, incarnation, FaultCode.FAILED, "it cannot go on")
    assert not any(isinstance(one, End) for one in router.handle(Arrived(node, failed), 0.1))
    assert router.sessions == (1,)
