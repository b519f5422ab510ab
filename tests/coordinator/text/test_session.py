"""The coordinator's machine: one text, whatever happens to the nodes."""

from dataclasses import replace
from itertools import pairwise

import pytest

from coordinator.text.session import (
    ANSWER_LIMIT_S,
    GIVE_UP_S,
    MAX_REOPENS_WITHOUT_PROGRESS,
    WORK_LIMIT_S_MIN,
    Session,
)
from coordinator.text.session_events import (
    Action,
    Emit,
    EmitPrompt,
    EmitRead,
    Event,
    Fail,
    FaultArrived,
    Finish,
    NodeId,
    NodeJoined,
    NodeLost,
    Overran,
    Progressed,
    PromptScored,
    RoundTripMeasured,
    Send,
    Started,
    Tick,
    VerdictArrived,
)
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import (
    OFF,
    Cause,
    Close,
    Fault,
    FaultCode,
    FinishReason,
    Limits,
    Logprobs,
    Lookup,
    Open,
    Policy,
    PromptLogprobs,
    Role,
    SessionMark,
    Verdict,
)
from tests.policies import autoregressive
from tests.texts import KEY, LIMITS, SPEC, STOP, SYNC_4, name, opening, verdict

DRAFTER, TARGET = b"drafter-1", b"target-1"
DRAFTER_OPEN, TARGET_OPEN = 1, 2  # the incarnations that `begun` gives


def session_of(*prompt: int, policy: Policy = SYNC_4, limits: Limits = LIMITS) -> Session:
    """A text of which nobody has been told."""
    return Session(1, KEY, prompt, sampling=SPEC, policy=policy, limits=limits)


def begun(*prompt: int, limits: Limits = LIMITS) -> Session:
    """A text that both nodes were told at time 0."""
    session = session_of(*prompt, limits=limits)
    for event in (Started(), NodeJoined(DRAFTER, Role.DRAFTER), NodeJoined(TARGET, Role.TARGET)):
        session.handle(event, 0.0)
    return session


def told(node: NodeId, *tokens: int, incarnation: int, limits: Limits = LIMITS) -> list[Action]:
    """A node is told the text, whose prompt is (1, 2)."""
    message = opening(*tokens, incarnation=incarnation, num_prompt=2, limits=limits)
    return [Send(node, message)]


def closed(reason: str) -> list[Action]:
    """Both nodes are told that it is over."""
    return [Send(node, Close(1, reason)) for node in (DRAFTER, TARGET)]


def said(session: Session, message: Verdict, now: float = 0.1) -> list[Action]:
    """The target speaks."""
    return session.handle(VerdictArrived(message), now)


def fault(node: NodeId, incarnation: int) -> Event:
    """A node has lost track."""
    return FaultArrived(node, Fault(1, incarnation, FaultCode.GAP, "lost"))


def test_every_node_that_joins_is_told_the_text() -> None:
    session = session_of(1, 2)
    assert session.handle(Started(), 0.0) == []
    assert session.handle(NodeJoined(DRAFTER, Role.DRAFTER), 0.0) == told(
        DRAFTER, 1, 2, incarnation=1
    )
    assert session.handle(NodeJoined(TARGET, Role.TARGET), 0.0) == told(TARGET, 1, 2, incarnation=2)
    assert session.mark_for(DRAFTER) == SessionMark(1, 1, 2, name(1, 2))
    assert session.mark_for(TARGET) == SessionMark(1, 2, 2, name(1, 2))


def test_without_a_drafter_in_the_policy_none_is_told() -> None:
    session = session_of(1, 2, policy=autoregressive())
    assert session.handle(NodeJoined(DRAFTER, Role.DRAFTER), 0.0) == []


def test_a_verdict_is_appended_and_emitted() -> None:
    session = begun(1, 2)
    five = verdict((1, 2), 3, 4, 5, 6, 7, incarnation=2, num_drafted=4, num_accepted=4)
    assert said(session, five) == [Emit((3, 4, 5, 6, 7), 4, 4, ())]
    assert session.num_generated == 5
    assert session.counts.num_passes == 1
    assert (session.counts.num_drafted, session.counts.num_accepted) == (4, 4)
    assert session.counts.causes == {"ready": 1}


def test_a_stop_token_ends_the_text_and_what_follows_is_cut() -> None:
    session = begun(1, 2)
    end = verdict((1, 2), 3, STOP, 5, num_drafted=3, num_accepted=3)
    assert said(session, end) == [
        Emit((3, STOP), 2, 3, ()),
        Finish(FinishReason.STOP),
        *closed("stop"),
    ]
    assert said(session, verdict((1, 2, 3, STOP), 5)) == []
    assert session.ended


def test_the_length_ends_the_text() -> None:
    limits = Limits(4, (STOP,))
    assert said(begun(1, 2, limits=limits), verdict((1, 2), 3, 4, 5)) == [
        Emit((3, 4), 0, 0, ()),
        Finish(FinishReason.LENGTH),
        *closed("length"),
    ]
    assert said(begun(1, 2, limits=limits), verdict((1, 2), 3, STOP))[1:] == [
        Finish(FinishReason.STOP),
        *closed("stop"),
    ]


def test_only_what_is_new_in_a_verdict_is_counted() -> None:
    session = begun(1, 2)
    said(session, verdict((1, 2), 3, 4))
    more = verdict((1, 2), 3, 4, 5, 6, num_drafted=3, num_accepted=3)
    assert said(session, more) == [Emit((5, 6), 1, 3, ())]
    assert session.counts.num_accepted == 1


def test_it_is_said_who_drafted_what_is_new() -> None:
    session = begun(1, 2)
    said(session, verdict((1, 2), 3, 4))
    more = verdict((1, 2), 3, 4, 5, 6, num_drafted=4, num_accepted=3)
    assert said(session, replace(more, sources=(0, 0, 1))) == [Emit((5, 6), 1, 4, (), sources=(1,))]


def test_only_the_target_is_told_what_to_copy_from() -> None:
    lookup = Lookup(2, 4, (7, 8, 9))
    session = Session(1, KEY, (1, 2), sampling=SPEC, policy=SYNC_4, limits=LIMITS, lookup=lookup)
    for role, expected in ((Role.DRAFTER, None), (Role.TARGET, lookup)):
        (send,) = session.handle(NodeJoined(role.encode(), role), 0.0)
        assert isinstance(send, Send)
        assert isinstance(send.message, Open)
        assert send.message.lookup == expected


def test_a_verdict_that_comes_twice_changes_nothing() -> None:
    session = begun(1, 2)
    said(session, verdict((1, 2), 3, 4))
    assert said(session, verdict((1, 2), 3, 4)) == []
    assert session.text.tokens == [1, 2, 3, 4]


def test_a_verdict_of_an_earlier_life_is_as_good_as_any() -> None:
    session = begun(1, 2)
    session.handle(NodeJoined(TARGET, Role.TARGET), 0.0)
    assert said(session, verdict((1, 2), 3, incarnation=TARGET_OPEN)) == [Emit((3,), 0, 0, ())]


def test_a_verdict_behind_a_lost_one_makes_the_target_start_from_our_text() -> None:
    session = begun(1, 2)
    behind = verdict((1, 2, 3), 4, incarnation=TARGET_OPEN)
    assert said(session, behind) == told(TARGET, 1, 2, incarnation=3)
    assert said(session, behind) == []  # that was answered
    assert session.counts.num_reopened == 1


def test_a_contradiction_is_counted_and_ours_is_kept() -> None:
    session = begun(1, 2)
    said(session, verdict((1, 2), 3, 4))
    contradiction = verdict((1, 2), 3, 5, incarnation=TARGET_OPEN)
    assert said(session, contradiction) == told(TARGET, 1, 2, 3, 4, incarnation=3)
    assert session.text.tokens == [1, 2, 3, 4]
    assert session.counts.num_diverged == 1


@pytest.mark.parametrize(("node", "incarnation"), [(DRAFTER, DRAFTER_OPEN), (TARGET, TARGET_OPEN)])
def test_a_gap_is_answered_with_the_text(node: NodeId, incarnation: int) -> None:
    session = begun(1, 2)
    assert session.handle(fault(node, incarnation), 0.1) == told(node, 1, 2, incarnation=3)


def test_a_gap_of_an_earlier_life_was_answered_unless_that_was_lost() -> None:
    session = begun(1, 2)
    session.handle(fault(DRAFTER, DRAFTER_OPEN), 1.0)
    assert session.handle(fault(DRAFTER, DRAFTER_OPEN), 1.1) == []
    assert session.handle(fault(DRAFTER, 0), 1.1) == []
    again = told(DRAFTER, 1, 2, incarnation=4)
    assert session.handle(fault(DRAFTER, DRAFTER_OPEN), 1.0 + ANSWER_LIMIT_S) == again


@pytest.mark.parametrize(("trip_s", "limit_s"), [(0.001, 0.0315), (0.12, 0.21), (1.0, 0.5)])
def test_how_soon_an_open_counts_as_lost_depends_on_the_way(trip_s: float, limit_s: float) -> None:
    session = begun(1, 2)
    session.handle(RoundTripMeasured(DRAFTER, trip_s), 0.5)
    session.handle(fault(DRAFTER, DRAFTER_OPEN), 1.0)
    assert session.handle(fault(DRAFTER, DRAFTER_OPEN), 0.999 + limit_s) == []
    again = told(DRAFTER, 1, 2, incarnation=4)
    assert session.handle(fault(DRAFTER, DRAFTER_OPEN), 1.001 + limit_s) == again


def test_a_target_that_is_told_in_vain_has_longer_and_longer_to_answer() -> None:
    session = begun(1, 2)
    session.handle(RoundTripMeasured(TARGET, 0.02), 0.5)
    now, told_at = 1.0, []
    while now < 6.0:
        if session.handle(fault(TARGET, TARGET_OPEN), now):
            told_at.append(now)
        now += 0.01
    waits = [later - at for at, later in pairwise(told_at)]
    assert waits[:3] == pytest.approx([0.06] * 3, abs=0.015)
    assert waits[-1] == pytest.approx(ANSWER_LIMIT_S, abs=0.015)
    assert waits[3:] == pytest.approx(sorted(waits[3:]), abs=0.015)


def test_other_faults_are_not_answered_with_the_text() -> None:
    session = begun(1, 2)
    refused = FaultArrived(TARGET, Fault(1, TARGET_OPEN, FaultCode.REFUSED, "broken"))
    assert session.handle(refused, 0.1) == []


def test_a_lost_drafter_costs_nothing_but_speed() -> None:
    session = begun(1, 2)
    said(session, verdict((1, 2), 3))
    assert session.handle(NodeLost(DRAFTER, Role.DRAFTER), 0.2) == []
    assert session.drafter_lost_at == 1
    assert said(session, verdict((1, 2, 3), 4)) == [Emit((4,), 0, 0, ())]
    assert session.handle(fault(DRAFTER, DRAFTER_OPEN), 0.3) == []  # nobody is there
    back = told(DRAFTER, 1, 2, 3, 4, incarnation=3)
    assert session.handle(NodeJoined(DRAFTER, Role.DRAFTER), 0.4) == back


def test_a_restarted_target_goes_on_from_the_committed_tokens() -> None:
    session = begun(1, 2)
    said(session, verdict((1, 2), 3, 4))
    assert session.handle(NodeLost(TARGET, Role.TARGET), 0.2) == []
    assert session.handle(Tick(), 100.0) == []  # nobody owes us anything
    back = told(TARGET, 1, 2, 3, 4, incarnation=3)
    assert session.handle(NodeJoined(TARGET, Role.TARGET), 100.0) == back


def test_a_target_that_owes_a_verdict_for_too_long_is_told_again() -> None:
    session = begun(1, 2)
    assert session.handle(Tick(), WORK_LIMIT_S_MIN) == []
    late = WORK_LIMIT_S_MIN + 0.01
    assert session.handle(Tick(), late) == told(TARGET, 1, 2, incarnation=3)
    assert session.handle(Tick(), late) == []


def test_a_target_that_makes_progress_owes_nothing() -> None:
    session = begun(1, 2)
    session.handle(Progressed(), 1.5)  # a chunk of a long prefill
    assert session.handle(Tick(), WORK_LIMIT_S_MIN + 0.01) == []


def beaten(session: Session, num_read: int, since: float, until: float) -> list[Action]:
    """Heartbeats tell of a pass under way, and time passes; what the machine wants."""
    actions: list[Action] = []
    for step in range(round((until - since) / HEARTBEAT_INTERVAL_S)):
        now = since + step * HEARTBEAT_INTERVAL_S
        actions += session.handle(Progressed(num_read), now)
        actions += session.handle(Tick(), now)
    return actions


def test_a_pass_is_waited_for_as_long_as_it_takes_and_the_reader_is_told_how_far_it_is() -> None:
    session = begun(*range(1, 1901), limits=Limits(2000, ()))
    actions: list[Action] = []
    for chunk in range(15):
        actions += beaten(session, 128 * chunk, 9.0 * chunk, 9.0 * (chunk + 1))
    assert actions == [EmitRead(128 * chunk, 1900) for chunk in range(1, 15)]
    assert session.counts.num_reopened == 0
    assert said(session, verdict(range(1, 1901), 3), now=136.0) == [Emit((3,), 0, 0, ())]


def test_more_of_a_text_that_is_read_forgives_earlier_trouble_and_the_same_again_does_not() -> None:
    """Else a target that never gets beyond some token would be told the text for ever."""
    session = begun(*range(1, 101), limits=Limits(200, ()))
    now = 0.0
    for num_read in (32, 64, 96):  # in each of which so many are lost as a text survives
        for _ in range(MAX_REOPENS_WITHOUT_PROGRESS):
            now += 10.0
            session.handle(Progressed(num_read), now - 5.0)
            session.handle(Tick(), now)
    assert session.counts.num_reopened == 3 * MAX_REOPENS_WITHOUT_PROGRESS
    assert not session.ended
    session.handle(Progressed(96), now + 5.0)
    assert isinstance(session.handle(Tick(), now + 10.0)[0], Fail)


def test_a_target_that_replaces_another_has_read_nothing_yet() -> None:
    session = begun(*range(1, 101), limits=Limits(200, ()))
    assert session.handle(Progressed(64), 1.0) == [EmitRead(64, 100)]
    session.handle(NodeLost(TARGET, Role.TARGET), 2.0)
    session.handle(NodeJoined(b"target-2", Role.TARGET), 3.0)
    assert session.num_read == 0
    assert session.handle(Progressed(32), 4.0) == [EmitRead(32, 100)]


def test_a_pass_that_takes_far_too_long_is_waited_for_no_longer_and_named_at_the_end() -> None:
    session = begun(1, 2)
    session.handle(Progressed(), 60.0)
    words = "its pass of 128 rows has not ended in 61 s (0.1 s are usual)"
    now = 60.0
    while not session.ended:
        now += HEARTBEAT_INTERVAL_S
        session.handle(Overran(words), now)
        actions = session.handle(Tick(), now)
    assert isinstance(actions[0], Fail)
    assert actions[0].detail.endswith(f"although it was told the text 21 times; {words}")
    assert GIVE_UP_S < now - 60.0 < 60.0


def test_slow_passes_make_the_limit_longer() -> None:
    session = begun(1, 2)
    text = [1, 2]
    for step in range(30):
        said(session, verdict(text, 3), now=1.0 * (step + 1))
        text.append(3)
    assert session.handle(Tick(), 30.0 + 5.0) == []  # passes take a second: the limit is near ten
    assert session.handle(Tick(), 30.0 + 10.1) != []


def test_a_target_that_never_continues_fails_the_text() -> None:
    session = begun(1, 2)
    actions: list[Action] = []
    now = 0.0
    for _ in range(MAX_REOPENS_WITHOUT_PROGRESS + 1):
        now += 10.0
        actions = session.handle(Tick(), now)
    assert isinstance(actions[0], Fail)
    assert actions[1:] == closed("failed")
    assert session.handle(Tick(), now + 100.0) == []


@pytest.mark.parametrize("stale", [0, 1])
def test_a_target_that_loses_track_at_once_is_told_for_thirty_seconds_and_not_too_often(
    stale: int,
) -> None:
    """On a link that loses nearly everything twenty are sent within seconds and few arrive."""
    session = begun(1, 2)
    session.handle(RoundTripMeasured(TARGET, 0.001), 0.5)
    incarnation, now = TARGET_OPEN, 1.0
    actions: list[Action] = []
    for step in range(1, 20_000):
        now = 1.0 + 0.002 * step
        of_life = incarnation - stale * (step % 3 == 0)
        actions = session.handle(fault(TARGET, of_life), now)
        if session.ended:
            break
        for action in actions:
            assert isinstance(action, Send)
            assert isinstance(action.message, Open)
            incarnation = action.message.incarnation
    assert actions[0] == Fail(
        "the target did not continue the text after 0 tokens, "
        f"although it was told the text {session.counts.num_reopened} times"
    )
    assert GIVE_UP_S <= now - 1.0 < GIVE_UP_S + ANSWER_LIMIT_S + 0.1
    assert MAX_REOPENS_WITHOUT_PROGRESS < session.counts.num_reopened < 80


def test_a_drafter_that_asks_for_the_text_all_the_time_gets_it_a_few_times_a_second() -> None:
    session = begun(1, 2, limits=Limits(500, ()))
    incarnation, num_told = DRAFTER_OPEN, 0
    text = [1, 2]
    for step in range(2_000):
        now = 0.002 * step
        if step % 20 == 0:  # the text grows all the while
            said(session, verdict(text, 3), now)
            text.append(3)
        for action in session.handle(fault(DRAFTER, incarnation), now):
            assert isinstance(action, Send)
            assert isinstance(action.message, Open)
            incarnation, num_told = action.message.incarnation, num_told + 1
    assert 8 <= num_told <= 4 * (3 + 1 / ANSWER_LIMIT_S) + 3


def test_progress_forgives_earlier_trouble() -> None:
    session = begun(1, 2)
    for step in range(MAX_REOPENS_WITHOUT_PROGRESS):
        session.handle(Tick(), 10.0 * (step + 1))
    said(session, verdict((1, 2), 3), now=201.0)
    assert session.handle(Tick(), 1000.0) != []
    assert not session.ended


def test_closing_tells_every_node_that_is_there() -> None:
    session = begun(1, 2)
    session.handle(NodeLost(DRAFTER, Role.DRAFTER), 0.1)
    assert session.close("the client is gone") == [Send(TARGET, Close(1, "the client is gone"))]
    assert session.handle(NodeJoined(DRAFTER, Role.DRAFTER), 0.2) == []


def test_what_is_said_again_is_one_plain_emission() -> None:
    session = begun(1, 2)
    again = verdict((1, 2), 3, 4, 5, cause=Cause.ALONE)
    assert said(session, again) == [Emit((3, 4, 5), 0, 0, ())]
    assert session.counts.num_accepted == 0


SCORED = replace(SPEC, num_logprobs=1, num_prompt_logprobs=1)
ROW = Logprobs((7, 8), (-1.0, -0.5), (2,))


def scored(*prompt: int) -> tuple[Session, list[Action]]:
    """A text whose logprobs are wanted, and what it does at first."""
    session = Session(1, KEY, prompt, sampling=SCORED, policy=SYNC_4, limits=LIMITS)
    actions = session.handle(Started(), 0.0)
    session.handle(NodeJoined(TARGET, Role.TARGET), 0.0)
    return session, actions


def piece(start: int, *, rows: int = 1) -> PromptScored:
    """Rows of the prompt."""
    logprobs = Logprobs(ROW.ids * rows, ROW.values * rows, ROW.ranks * rows)
    return PromptScored(PromptLogprobs(1, 1, start, logprobs))


def test_logprobs_of_the_prompt_are_emitted_once_they_are_complete() -> None:
    session, actions = scored(1, 2, 3, 4)
    assert actions == []
    assert session.handle(piece(1), 0.0) == []
    assert session.handle(piece(3), 0.0) == []  # the second is missing
    assert session.handle(piece(1, rows=2), 0.0) == []
    three = Logprobs(ROW.ids * 3, ROW.values * 3, ROW.ranks * 3)
    assert session.handle(piece(3, rows=5), 0.0) == [EmitPrompt(three)]
    assert session.handle(piece(3), 0.0) == []
    (send,) = session.handle(NodeJoined(TARGET, Role.TARGET), 0.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, Open)
    assert send.message.sampling == replace(SCORED, num_prompt_logprobs=OFF)


def test_a_prompt_of_one_token_has_nothing_to_wait_for() -> None:
    assert scored(1)[1] == [EmitPrompt(Logprobs())]


def test_a_verdict_before_the_logprobs_of_the_prompt_makes_the_target_start_again() -> None:
    session, _ = scored(1, 2)
    early = replace(verdict((1, 2), 3), logprobs=ROW)
    (send,) = session.handle(VerdictArrived(early), 0.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, Open)
    assert session.num_generated == 0


def test_logprobs_are_those_of_what_is_new_in_a_verdict() -> None:
    session, _ = scored(1, 2)
    session.handle(piece(1), 0.0)
    session.handle(VerdictArrived(replace(verdict((1, 2), 3), logprobs=ROW)), 0.0)
    rows = Logprobs((3, 0, 4, 0), (-1.0, -0.5, -2.0, -0.25), (2, 3))
    again = replace(verdict((1, 2), 3, 4), logprobs=rows)
    assert session.handle(VerdictArrived(again), 0.0) == [Emit((4,), 0, 0, (), rows.part(1, 2))]


def test_a_verdict_without_the_logprobs_that_are_wanted_is_not_taken() -> None:
    session, _ = scored(1, 2)
    session.handle(piece(1), 0.0)
    (send,) = session.handle(VerdictArrived(verdict((1, 2), 3)), 0.0)
    assert isinstance(send, Send)
    assert session.num_generated == 0
