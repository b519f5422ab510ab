"""The target's machine in trouble: lives, lost messages, contradictions."""

from dataclasses import replace

from engine.layout.slots import Feed
from node.events import Allocate, Send, Wipe
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import (
    Ack,
    Cause,
    Close,
    Heartbeat,
    Verdict,
)
from proto.policies import POLICIES
from target_node.compute import Action, Outcome
from target_node.resting import Way
from tests.target_node.target import Target, gap, marked, part_of, ready
from tests.texts import LIMITS, PIPELINED, STOP, draft, opening, verdict


def test_a_result_of_an_earlier_life_is_ignored() -> None:
    target = Target()
    target.hears(opening(1, 2))
    target.ticks()
    target.hears(opening(1, 2, 3, incarnation=2))
    assert target.ticks() == []  # one pass at a time, whosever it is
    assert target.computes(1, 9) == []
    feed = Feed((3,), (2,), (2,), 2, (1,))
    assert target.ticks() == [target.asks(2, feed, 1, (3,), number=1)]
    expected = verdict((1, 2, 3), 4, incarnation=2, cause=Cause.QUIET, awaits=4)
    assert target.computes(2, 4) == [Send(expected)]


def test_a_result_after_a_close_is_ignored() -> None:
    target = Target()
    target.hears(opening(1, 2))
    target.ticks()
    assert target.hears(Close(1, "stop")) == []
    assert target.computes(1, 3) == []
    assert target.ticks() == []
    assert target.dispatcher.marks == ()


def test_an_open_that_is_not_newer_is_ignored() -> None:
    target = Target()
    target.hears(opening(1, 2, incarnation=2))
    assert target.hears(opening(1, 2, incarnation=2)) == []
    assert target.hears(opening(1, 2, incarnation=1)) == []


def test_what_the_coordinator_has_missed_is_said_again_and_not_computed_twice() -> None:
    target = ready(draft((1, 2, 3), 4, 5))
    target.ticks()
    target.computes(2, 4, 5, 6)
    again = verdict((1, 2), 3, 4, 5, 6, incarnation=2, cause=Cause.ALONE, awaits=2)
    reopened = opening(1, 2, incarnation=2, policy=PIPELINED)
    assert target.hears(reopened) == [Allocate(LIMITS.max_len), Send(again)]
    assert target.ticks() == [target.rows(3, (6,), 5, number=1)]


def test_a_text_that_has_ended_is_said_again_with_its_end() -> None:
    target = ready(draft((1, 2, 3), 4, STOP))
    target.ticks()
    target.computes(2, 4, STOP, 6)
    again = verdict((1, 2, 3), 4, STOP, incarnation=2, cause=Cause.ALONE)
    assert target.hears(opening(1, 2, 3, incarnation=2, num_prompt=2))[1:] == [Send(again)]
    assert target.machine.finished
    assert target.ticks() == []


def test_a_text_that_contradicts_ours_replaces_it() -> None:
    target = ready()
    assert target.hears(opening(1, 7, incarnation=2)) == [Allocate(40)]
    assert target.ticks() == [target.rows(2, (7,), 1, number=1)]


def test_a_heartbeat_tells_what_was_missed() -> None:
    target = Target()
    assert target.hears(marked(1, 2)) == gap(0, 0)  # the Open was lost
    target.hears(opening(1, 2))
    assert target.hears(marked(1, 2)) == []
    target.ticks()
    target.computes(1, 3)
    assert target.hears(marked(1, 2)) == []  # a verdict is on its way
    assert target.hears(marked(1, 9)) == gap(1, 3)


def test_a_last_verdict_that_was_lost_is_said_again() -> None:
    target = Target()
    target.hears(opening(1, 2))
    target.ticks()
    target.computes(1, STOP)
    again = verdict((1, 2), STOP, cause=Cause.ALONE)
    assert target.hears(marked(1, 2)) == [Send(again)]
    assert target.hears(marked(1, 2, STOP)) == []


def test_what_is_said_again_does_not_wake_a_drafter_that_rests() -> None:
    target = Target()
    target.hears(opening(1, 2, policy=POLICIES["auto"].make()))
    target.ticks()
    target.computes(1, 3)
    course = target.machine.course
    assert course is not None
    course.way = Way.RESTING
    target.ticks()
    target.computes(2, STOP)
    (said,) = target.hears(marked(1, 2))
    assert isinstance(said, Send)
    assert isinstance(said.message, Verdict)
    assert said.message.cause is Cause.RESTING


def test_what_a_failed_pass_should_have_cached_is_cached_for_no_later_text() -> None:
    for outcome in (Outcome((), failure="no memory"), Outcome((), bad_at=3)):
        for next_one in (opening(1, 2, 3, session=2), opening(1, 2, 3, incarnation=2)):
            target = Target()
            target.hears(opening(1, 2, 3))
            target.ticks()  # a pass feeds all three tokens
            if next_one.session == 2:
                target.hears(Close(1, "stop"))
            target.hears(next_one)
            assert target.answers(1, outcome) == [Wipe(0, 0)]
            assert part_of(target.ticks()).feed.tokens == (1, 2, 3)


def reminded(target: Target, *path: int, after_s: float) -> list[Action]:
    """A drafter that is at this path says all that it has again."""
    target.now += after_s
    return target.hears(draft(path, 7, first_number=1, number=3))


def test_a_drafter_that_waits_for_a_verdict_which_was_lost_is_told_again() -> None:
    target = ready(draft((1, 2, 3), 4, 5))
    target.ticks()
    target.computes(2, 4, 5, 6)
    target.known.costs.reply.add(0.2)
    again = replace(verdict((1, 2, 3), 4, 5, 6, cause=Cause.ALONE, awaits=2), acks=(Ack(0, 1, 3),))
    assert reminded(target, 1, 2, 3, after_s=0.1) == [], "the verdict may be on its way"
    assert reminded(target, 1, 2, 3, after_s=0.15) == [Send(again)]
    assert reminded(target, 1, 2, 3, after_s=0.15) == [], "and so may what was said again"
    assert reminded(target, 1, 2, 3, after_s=0.15) == [Send(again)]
    assert reminded(target, 1, 2, 3, 4, 5, 6, after_s=1.0) == [], "it knows all"
    assert reminded(target, 1, 9, after_s=1.0) == [], "it has another text, and will be told so"


def test_a_session_that_no_heartbeat_names_is_closed() -> None:
    target = Target()
    target.hears(opening(1, 2))
    target.ticks()
    target.now += HEARTBEAT_INTERVAL_S
    assert target.hears(Heartbeat((), 0, "")) == []
    assert target.dispatcher.marks == ()
    assert target.computes(1, 3) == []
