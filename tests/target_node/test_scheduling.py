"""Which texts share the target's next pass, when it starts, and who hears of it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.layout.slots import Move, SlotMap
from node.economics import FIRST_OF_MODEL, WAIT_S_MAX, num_expected, worth_holding_s
from node.events import CopyPrefix, MoveRows, Send, WaitUntil
from node.rows import PREFILL_CHUNK
from proto.messages import NGRAM_SOURCE, Cause, Close, Limits, Lookup, Open, Policy, Verdict
from proto.policies import without_prices
from target_node.compute import Action, Compute, Outcome
from target_node.resting import Way
from tests.policies import autoregressive, pipelined
from tests.target_node.target import Target, parts_of
from tests.texts import PIPELINED, STOP, draft, opening

LONG = tuple(range(1000, 1000 + PREFILL_CHUNK + 100))
ROOMY = Limits(max_len=900, stop_ids=(STOP,))


def text(session: int) -> tuple[int, ...]:
    """A text that begins like no other."""
    return session, session + 10, session + 20


def opens(session: int, *tokens: int, policy: Policy | None = None, incarnation: int = 1) -> Open:
    """Open of a text that is written without drafts, if nothing else is said."""
    return opening(
        *(tokens or text(session)),
        session=session,
        policy=policy or autoregressive(),
        limits=ROOMY,
        incarnation=incarnation,
    )


def target_of(*messages: Open, num_per_pass: int | None = None) -> Target:
    """A target with these texts, and lanes for one more."""
    target = Target(num_lanes=len(messages) + 1, num_per_pass=num_per_pass)
    target.hears(*messages)
    return target


def sessions(actions: Sequence[Action]) -> list[int]:
    """The texts of the pass that starts."""
    return [part.opened.session for part in parts_of(actions)]


def drafts(actions: Sequence[Action]) -> dict[int, tuple[int, ...]]:
    """What the pass that starts verifies of each text."""
    return {part.opened.session: part.drafted for part in parts_of(actions)}


def verdicts(actions: Sequence[Action]) -> dict[int, tuple[int, ...]]:
    """What is said of each text."""
    said = {}
    for action in actions:
        if isinstance(action, Send):
            assert isinstance(action.message, Verdict)
            said[action.message.session] = action.message.tokens
    return said


def causes(actions: Sequence[Action]) -> dict[int, Cause]:
    """Why each text had its verdict."""
    messages = [action.message for action in actions if isinstance(action, Send)]
    return {said.session: said.cause for said in messages if isinstance(said, Verdict)}


def passes(target: Target, count: int, pass_s: float = 1.0) -> list[list[int]]:
    """So many passes, in which every text is asked for writes on; the texts of each."""
    served = []
    for _ in range(count):
        *_, compute = target.ticks()
        assert isinstance(compute, Compute)
        served.append([part.opened.session for part in compute.parts])
        outcomes = (Outcome((50,) * part.num_asked) for part in compute.parts)
        target.answers(compute.ticket, *outcomes, pass_s=pass_s)
    return served


# -- one pass for several -------------------------------------------------------------------------


def test_one_pass_serves_every_text_and_each_has_its_own_outcome() -> None:
    target = target_of(opens(1), opens(2), opens(3))
    parts = parts_of(target.ticks())
    assert [part.feed.tokens for part in parts] == [text(1), text(2), text(3)]
    assert len({part.feed.lane for part in parts}) == 3
    assert target.ticks() == [], "one pass at a time"
    actions = target.answers(1, Outcome((5,)), Outcome((6,)), Outcome((7,)))
    assert verdicts(actions) == {1: (5,), 2: (6,), 3: (7,)}
    assert [part.feed.tokens for part in parts_of(target.ticks())] == [(5,), (6,), (7,)]


def test_a_text_that_has_ended_takes_no_rows() -> None:
    target = target_of(opens(1), opens(2))
    target.ticks()
    target.answers(1, Outcome((STOP,)), Outcome((6,)))
    assert sessions(target.ticks()) == [2]


def test_a_text_that_was_closed_in_between_hears_nothing_and_the_others_do() -> None:
    target = target_of(opens(1), opens(2), opens(3))
    target.ticks()
    target.hears(Close(2, "stop"))
    assert verdicts(target.answers(1, *[Outcome((5,))] * 3)) == {1: (5,), 3: (5,)}


def test_nor_does_one_that_was_opened_anew() -> None:
    target = target_of(opens(1), opens(2))
    target.ticks()
    target.hears(opens(2, *text(2), 7, incarnation=2))
    assert verdicts(target.answers(1, Outcome((5,)), Outcome((6,)))) == {1: (5,)}
    first, second = parts_of(target.ticks())
    assert (first.opened.session, second.feed.tokens) == (2, (5,)), "who waits goes first"
    assert (first.feed.tokens, first.number) == ((7,), 1)


def test_a_text_that_takes_the_lane_of_a_closed_one_hears_nothing_of_its_pass() -> None:
    target = Target(num_lanes=2)
    target.hears(opens(1), opens(2))
    target.ticks()
    target.hears(Close(2, "stop"), opens(3))
    assert verdicts(target.answers(1, Outcome((5,)), Outcome((6,)))) == {1: (5,)}
    assert sessions(target.ticks()) == [3, 1]


def test_a_pass_whose_texts_are_all_gone_is_over_all_the_same() -> None:
    target = target_of(opens(1))
    target.ticks()
    target.hears(Close(1, "stop"), opens(2))
    assert target.ticks() == []
    assert target.answers(1, Outcome((5,))) == []
    assert sessions(target.ticks()) == [2]


def test_the_rows_of_all_texts_are_moved_at_once_after_the_last_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advance = SlotMap.advance

    def moves(slots: SlotMap[int], path: list[int], survivors: dict[int, object]) -> Move:
        """As if the accepted path lay scattered."""
        assert advance(slots, path, survivors) is None
        return Move((9,), (8,), slots.lane)

    monkeypatch.setattr(SlotMap, "advance", moves)
    target = target_of(opens(1), opens(2))
    lanes = [part.feed.lane for part in parts_of(target.ticks())]
    *sends, moved = target.answers(1, Outcome((5,)), Outcome((6,)))
    assert verdicts(sends) == {1: (5,), 2: (6,)}
    assert moved == MoveRows(tuple(Move((9,), (8,), lane) for lane in lanes))


def test_a_pass_that_is_launched_before_the_last_one_is_told_finds_its_rows_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    move = Move((9,), (8,))
    monkeypatch.setattr(SlotMap, "advance", lambda *_: move)
    target = target_of(opens(1))
    target.ticks()
    target.goes_on(1, Outcome((5,)))
    moved, launched = target.ticks()
    assert moved == MoveRows((move,))
    assert sessions([launched]) == [1]
    assert verdicts(target.tells()) == {1: (5,)}


def test_what_is_told_of_a_pass_is_the_same_when_the_next_one_is_running() -> None:
    told = []
    for is_next_launched in (False, True):
        target = target_of(opens(1))
        target.ticks()
        target.hears(draft(text(1), 7, 8, session=1))
        target.goes_on(1, Outcome((5,)), pass_s=0.01)
        if is_next_launched:
            assert sessions(target.ticks()) == [1]
        target.now += 0.001
        told.append(target.tells())
    assert told[0] == told[1]


def test_without_a_next_pass_the_verdict_comes_before_the_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SlotMap, "advance", lambda *_: Move((9,), (8,)))
    target = target_of(opens(1, policy=PIPELINED))
    target.ticks()
    target.hears(draft(text(1), 5, session=1))
    target.goes_on(1, Outcome((6,)), pass_s=0.01)
    assert all(isinstance(action, WaitUntil) for action in target.ticks())
    assert [type(action) for action in target.tells()] == [Send, MoveRows]


def test_what_became_of_copies_is_learnt_also_when_the_next_pass_has_others() -> None:
    again = opens(1, *(1, 2, 3, 4) * 3)
    target = target_of(replace(again, lookup=Lookup(1, 4), policy=PIPELINED))
    assert drafts(target.ticks())[1][:2] == (1, 2)
    target.goes_on(1, Outcome((9,) * 8))
    target.ticks()
    chance, kind = target.known.acceptance.chance, (NGRAM_SOURCE, 4)
    before = chance(kind)
    target.tells()
    assert chance(kind) < before, "the first copy, which was wrong, is forgotten"


def test_of_a_pass_that_was_not_told_no_second_one_is_forgotten() -> None:
    target = target_of(opens(1))
    target.ticks()
    target.goes_on(1, Outcome((5,)))
    target.ticks()
    with pytest.raises(AssertionError, match="the previous pass was not reported yet"):
        target.goes_on(2, Outcome((6,)))


# -- turns ----------------------------------------------------------------------------------------


def test_a_prompt_is_read_in_turns_with_the_passes_of_the_others() -> None:
    target = target_of(opens(1), opens(2, *LONG, *LONG[::-1]), opens(3))
    assert passes(target, 4) == [[2], [1, 3], [2], [1, 3]]


def test_several_prompts_take_turns_too() -> None:
    target = target_of(opens(1), opens(2, *LONG, *LONG[::-1]), opens(3, *LONG[::-1], *LONG))
    assert passes(target, 6) == [[2], [1], [3], [1], [2], [1]]


def test_nobody_who_could_go_on_is_passed_over_twice_in_a_row() -> None:
    target = target_of(opens(1), opens(2), opens(3, *LONG, *range(300)), opens(4, *LONG[::-1]))
    served = passes(target, 12)
    for session in (1, 2):
        turns = [index for index, texts in enumerate(served) if session in texts]
        assert turns[0] <= 1
        assert all(after - before <= 2 for before, after in pairwise(turns))


def test_where_not_all_have_room_the_least_recently_served_go_first() -> None:
    target = target_of(opens(1), opens(2), opens(3), num_per_pass=2)
    assert passes(target, 4) == [[1, 2], [3, 1], [2, 3], [1, 2]]


def test_who_waits_for_drafts_takes_no_room_from_who_has_them() -> None:
    target = beside_one_that_waits(num_per_pass=1)
    # The other one was served less recently, and its drafts would be worth a wait.
    target.known.costs.reply.add(0.4)
    assert sessions(target.ticks()) == [2]


# -- holding a pass -------------------------------------------------------------------------------

# What two drafts bring before anything is known, and how long they are worth to a pass of a second.
TWO = num_expected(0.7, 2) - 1.0
WORTH_S = worth_holding_s(2.0 + TWO, TWO, 1.0)


def beside_one_that_waits(*, num_per_pass: int | None = None, pass_s: float = 1.0) -> Target:
    """Just after a pass of one second: 2 has its drafts, those of 1 are expected."""
    messages = [opens(n, policy=PIPELINED) for n in (1, 2)]
    target = target_of(*messages, num_per_pass=num_per_pass)
    num_passes = 2 if num_per_pass == 1 else 1
    passes(target, num_passes, pass_s=pass_s / num_passes)
    target.hears(
        draft((9,), 9, session=1),  # a sign of life, and nothing that fits
        draft((*text(2), 50), 60, 61, session=2),
    )
    return target


def test_a_pass_is_held_for_drafts_that_are_expected_soon() -> None:
    target = beside_one_that_waits()
    target.known.costs.reply.add(0.2)
    (wait,) = target.ticks()
    assert isinstance(wait, WaitUntil)
    assert wait.deadline == pytest.approx(1.0 + WORTH_S)
    target.now = 1.2
    assert target.ticks() == [wait], "as long as from the start"
    target.hears(draft((*text(1), 50), 60, 61, session=1, number=2))
    assert drafts(target.ticks()) == {1: (60, 61), 2: (60, 61)}
    actions = target.answers(2, Outcome((60, 61, 62)), Outcome((60, 70, 71)))
    assert causes(actions) == {1: Cause.READY, 2: Cause.READY}
    assert verdicts(actions) == {1: (60, 61, 62), 2: (60, 70)}


def test_who_is_overdue_is_not_waited_for_but_goes_along() -> None:
    target = beside_one_that_waits()
    target.known.costs.reply.add(0.2)
    (wait,) = target.ticks()
    assert isinstance(wait, WaitUntil)
    target.now = wait.deadline
    assert drafts(target.ticks()) == {1: (), 2: (60, 61)}
    actions = target.answers(2, Outcome((60, 61, 62)), Outcome((80,)))
    assert causes(actions) == {1: Cause.CHEAP, 2: Cause.READY}


def test_a_pass_is_not_held_for_drafts_that_come_too_late() -> None:
    target = beside_one_that_waits()
    target.known.costs.reply.add(0.9)
    assert drafts(target.ticks()) == {1: (), 2: (60, 61)}


def test_nor_where_the_first_comes_soon_and_the_others_too_late() -> None:
    target = beside_one_that_waits()
    target.known.costs.reply.add(0.2)
    target.known.costs.draft.add(5.0)
    assert drafts(target.ticks()) == {1: (), 2: (60, 61)}


def test_nor_for_drafts_that_are_hardly_ever_right() -> None:
    target = beside_one_that_waits()
    target.known.costs.reply.add(0.2)
    for _ in range(200):
        target.known.acceptance.add(FIRST_OF_MODEL, right=False)
    assert set(drafts(target.ticks())) == {1, 2}


def test_nor_before_it_is_known_how_long_they_take() -> None:
    target = beside_one_that_waits()
    assert target.known.costs.reply.num == 0
    assert drafts(target.ticks()) == {1: (), 2: (60, 61)}


def test_nor_beyond_the_deadline_of_who_waits() -> None:
    target = beside_one_that_waits(pass_s=10.0)
    target.known.costs.reply.add(0.5)
    assert 10.0 * WORTH_S > WAIT_S_MAX
    assert target.ticks() == [WaitUntil(10.0 + WAIT_S_MAX)]


def test_where_all_wait_the_first_deadline_starts_a_pass_of_all() -> None:
    target = target_of(opens(1, policy=PIPELINED), opens(2, policy=PIPELINED))
    passes(target, 1)
    target.hears(draft((9,), 9, session=1), draft((9,), 9, session=2))
    (wait,) = target.ticks()
    assert wait == WaitUntil(2.0)
    target.now = 2.0
    target.ticks()
    actions = target.answers(2, Outcome((60,)), Outcome((60,)))
    assert causes(actions) == {1: Cause.LATE, 2: Cause.LATE}


# -- texts that begin alike -----------------------------------------------------------------------


def test_a_text_that_begins_alike_waits_and_then_takes_a_copy() -> None:
    target = target_of(opens(1, *LONG), opens(2, *LONG[:300], *text(2)))
    assert passes(target, 3) == [[1], [1], [1]], "two chunks, then the first has its turn"
    copy, compute = target.ticks()
    assert copy == CopyPrefix(0, 1, 300)
    assert isinstance(compute, Compute)
    assert [part.opened.session for part in compute.parts] == [2, 1]
    assert compute.parts[0].feed.tokens == text(2)


def test_nothing_is_copied_in_reproducible_mode_and_chunks_come_alone() -> None:
    target = Target(fixed_rows=4, num_lanes=2)
    target.hears(opens(1, *LONG), opens(2, *LONG))
    num_read = {1: 0, 2: 0}
    for _ in range(20):
        (compute,) = target.ticks()
        assert isinstance(compute, Compute)
        is_chunk = [part.feed.masks is None for part in compute.parts]
        assert is_chunk == [True] or not any(is_chunk)
        for part in compute.parts:
            num_read[part.opened.session] += len(part.feed.tokens) if any(is_chunk) else 0
            assert any(is_chunk) or len(part.feed.tokens) <= 4
        target.answers(compute.ticket, *(Outcome((50,) * part.num_asked) for part in compute.parts))
    assert num_read == {1: len(LONG) - 1, 2: len(LONG) - 1}


# -- what is learnt -------------------------------------------------------------------------------


def test_a_pass_is_measured_by_its_texts_and_rows() -> None:
    target = target_of(opens(1), opens(2))
    passes(target, 2, pass_s=3.0)
    costs = target.known.costs
    assert costs.passes(2).of(2) == pytest.approx(3.0)
    assert costs.passes(2).token.value == pytest.approx(1.5), "two tokens a pass"
    assert costs.passes(1).token.num == 0


def test_neither_a_chunk_nor_a_pass_that_lost_a_text_is_measured() -> None:
    target = target_of(opens(1, *LONG), opens(2, *LONG[::-1]))
    assert passes(target, 3, pass_s=3.0) == [[1], [2], [1]]
    assert target.known.costs.pass_s() == 0.0
    assert passes(target, 1, pass_s=2.0) == [[1]]
    assert passes(target, 1, pass_s=3.0) == [[2]]
    assert target.known.costs.pass_s() == 2.0
    assert sessions(target.ticks()) == [1, 2]
    target.hears(Close(1, "stop"))
    target.answers(6, Outcome((50,)), Outcome((50,)), pass_s=9.0)
    assert target.known.costs.pass_s() == 2.0


def test_where_rows_cost_too_much_only_a_text_that_insists_has_drafts() -> None:
    target = Target(num_lanes=2, pass_s={8: 1.0, 10: 50.0})
    always = without_prices(PIPELINED)
    target.hears(opens(1, policy=PIPELINED), opens(2, policy=always))
    target.hears(*(draft(text(n), 60, 61, session=n) for n in (1, 2)))
    assert drafts(target.ticks()) == {1: (), 2: (60, 61)}


# -- rest -----------------------------------------------------------------------------------------

FREE, OTHER = pipelined(8, 16), pipelined(4, 16)


def rest(target: Target, message: Open, num_texts: int, *, rests: bool = True) -> None:
    """Texts like this one are faster alone where so many share the passes."""
    course = target.known.courses.of(message, num_texts)
    assert course is not None
    course.way = Way.RESTING if rests else Way.DRAFTING


def test_whether_a_drafter_rests_is_known_for_each_kind_of_text() -> None:
    target = target_of(opens(1, policy=FREE), opens(2, policy=OTHER), opens(3, policy=FREE))
    rest(target, opens(1, policy=FREE), 3)
    target.ticks()
    actions = target.answers(1, *[Outcome((50,))] * 3)
    assert causes(actions) == {1: Cause.RESTING, 2: Cause.QUIET, 3: Cause.RESTING}


def test_and_for_each_number_of_texts() -> None:
    target = target_of(opens(1, policy=FREE), opens(2, policy=FREE))
    rest(target, opens(1, policy=FREE), 2)
    target.ticks()
    actions = target.answers(1, *[Outcome((50,))] * 2)
    assert set(causes(actions).values()) == {Cause.RESTING}
    target.hears(Close(2, "stop"))
    target.ticks()
    assert causes(target.answers(2, Outcome((50,)))) == {1: Cause.QUIET}


def test_who_wakes_up_is_not_waited_for_though_it_had_no_part_in_the_pass() -> None:
    messages = [opens(n, policy=FREE) for n in (1, 2)]
    target = target_of(*messages, num_per_pass=1)
    target.hears(*(draft((9,), 9, session=n) for n in (1, 2)))
    rest(target, messages[0], 1)
    assert passes(target, 2) == [[1], [2]]
    rest(target, messages[0], 1, rests=False)
    target.ticks()
    assert causes(target.answers(3, Outcome((50,)))) == {1: Cause.QUIET}
    target.ticks()
    assert causes(target.answers(4, Outcome((50,)))) == {2: Cause.QUIET}
