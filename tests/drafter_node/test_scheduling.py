"""Which texts share the drafter's next forward."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest

from drafter_node.compute import Action, Compute
from drafter_node.sending import WAIT_S_FIRST
from node.events import CopyPrefix, Send, WaitUntil
from node.rows import PREFILL_CHUNK
from proto.messages import Cause, Close, Draft, Limits, Open, Policy
from tests.drafter_node.drafter import NOT_ASKED, Drafter, chosen, parts_of
from tests.texts import PIPELINED, STOP, SYNC_4, opening, verdict

LONG = tuple(range(1000, 1000 + PREFILL_CHUNK + 100))
ROOMY = Limits(max_len=900, stop_ids=(STOP,))
FREE_ROWS = {1: 1.0, 8: 1.0}
DEAR_ROWS = {1: 1.0, 2: 2.0, 8: 8.0}


def text(session: int) -> tuple[int, ...]:
    """A text that begins like no other."""
    return session, session + 10, session + 20


def opens(session: int, *tokens: int, policy: Policy = PIPELINED, incarnation: int = 1) -> Open:
    """Open of a text."""
    tokens = tokens or text(session)
    return opening(*tokens, session=session, policy=policy, limits=ROOMY, incarnation=incarnation)


def drafter_of(
    *messages: Open, step_s: Mapping[int, float] = FREE_ROWS, num_per_pass: int | None = None
) -> Drafter:
    """A drafter with these texts, and lanes for one more."""
    drafter = Drafter(
        max_len=900, step_s=step_s, num_lanes=len(messages) + 1, num_per_pass=num_per_pass
    )
    drafter.hears(*messages)
    return drafter


def sessions(actions: Sequence[Action]) -> list[int]:
    """The texts of the forward that starts."""
    return [part.opened.session for part in parts_of(actions)]


def drafts(actions: Sequence[Action]) -> dict[int, tuple[int, ...]]:
    """What is sent of each text."""
    said = {}
    for action in actions:
        assert isinstance(action, Send)
        assert isinstance(action.message, Draft)
        said[action.message.session] = action.message.tokens
    return said


def forwards(drafter: Drafter, scores: Sequence[Mapping[int, float]]) -> list[list[int]]:
    """So many forwards, each with these scores of what is chosen, by text; the texts of each."""
    served = []
    for of in scores:
        *_, compute = drafter.ticks()
        assert isinstance(compute, Compute)
        served.append([part.opened.session for part in compute.parts])
        children = (
            chosen(50, score=of[served[-1][i]]) if part.num_asked else NOT_ASKED
            for i, part in enumerate(compute.parts)
        )
        drafter.answers(compute.ticket, *children)
    return served


ALIKE = {1: -0.1, 2: -0.1, 3: -0.1}


# -- one forward for several ----------------------------------------------------------------------


def test_one_forward_serves_every_text_and_each_has_its_own_draft() -> None:
    drafter = drafter_of(opens(1), opens(2), opens(3))
    parts = parts_of(drafter.ticks())
    assert [part.feed.tokens for part in parts] == [text(1), text(2), text(3)]
    assert len({part.feed.lane for part in parts}) == 3
    assert drafter.ticks() == [], "one forward at a time"
    assert drafts(drafter.answers(1, chosen(5), chosen(6), chosen(7))) == {
        1: (5,),
        2: (6,),
        3: (7,),
    }
    assert [part.feed.tokens for part in parts_of(drafter.ticks())] == [(5,), (6,), (7,)]


def test_what_was_closed_or_opened_anew_in_between_has_no_draft_and_the_others_do() -> None:
    drafter = drafter_of(opens(1), opens(2), opens(3))
    drafter.ticks()
    drafter.hears(Close(1, "stop"), opens(2, *text(2), 9, incarnation=2))
    assert drafts(drafter.answers(1, chosen(5), chosen(6), chosen(7))) == {3: (7,)}
    assert sorted(sessions(drafter.ticks())) == [2, 3]


def test_a_prompt_is_read_in_turns_with_the_drafts_of_the_others() -> None:
    drafter = drafter_of(opens(1), opens(2, *LONG, *LONG[::-1]), opens(3))
    served = forwards(drafter, [ALIKE] * 4)
    assert [sorted(texts) for texts in served] == [[2], [1, 3], [2], [1, 3]]


def test_several_prompts_take_turns_too() -> None:
    drafter = drafter_of(opens(2, *LONG, *LONG[::-1]), opens(3, *LONG[::-1], *LONG))
    assert forwards(drafter, [ALIKE] * 4) == [[2], [3], [2], [3]]


def test_a_text_that_begins_alike_waits_and_then_takes_a_copy() -> None:
    drafter = drafter_of(opens(1, *LONG), opens(2, *LONG[:300], *text(2)))
    assert forwards(drafter, [ALIKE] * 3) == [[1], [1], [1]], (
        "two chunks, then its first has a turn"
    )
    copy, compute = drafter.ticks()
    assert copy == CopyPrefix(0, 1, 300)
    assert isinstance(compute, Compute)
    fed = {part.opened.session: part.feed.tokens for part in compute.parts}
    assert fed == {1: (50,), 2: text(2)}


# -- which rows -----------------------------------------------------------------------------------


def test_where_rows_are_free_every_text_has_one() -> None:
    drafter = drafter_of(opens(1), opens(2), opens(3))
    served = forwards(drafter, [{1: -0.9, 2: -0.1, 3: -0.4}] * 3)
    assert [sorted(texts) for texts in served] == [[1, 2, 3]] * 3


def test_where_they_are_dear_the_likeliest_has_the_row_and_the_others_come_first_then() -> None:
    drafter = drafter_of(opens(1), opens(2), step_s=DEAR_ROWS)
    served = forwards(drafter, [{1: -1.2, 2: -0.1}] * 2)
    assert served == [[1], [2]], "nothing is known of them, and each has its turn"
    # Now 2 is likelier; 1 was left out.
    assert forwards(drafter, [{1: -1.2, 2: -0.1}] * 2) == [[1], [2]]


def test_nobody_is_left_out_twice_in_a_row() -> None:
    drafter = drafter_of(*map(opens, (1, 2, 3, 4)), step_s={1: 1.0, 2: 1.1, 3: 2.5, 9: 9.0})
    served = forwards(drafter, [{1: -0.01, 2: -0.01, 3: -0.4, 4: -0.4}] * 6)
    for before, after in pairwise(served):
        assert {1, 2, 3, 4} - set(before) <= set(after)


def test_where_not_all_have_room_the_least_recently_served_go_first() -> None:
    scores = {1: -0.01, 2: -0.01, 3: -0.4}
    drafter = drafter_of(*map(opens, (1, 2, 3)), num_per_pass=1)
    assert forwards(drafter, [scores] * 6) == [[1], [2], [3], [1], [2], [3]]


def test_what_forwards_take_is_learnt_by_their_rows_and_chunks_do_not_count() -> None:
    drafter = drafter_of(opens(1, *LONG), opens(2), step_s={1: 1.0})
    for rows, step_s in ((PREFILL_CHUNK, 70.0), (3, 5.0)):
        (part,) = parts_of(drafter.ticks())
        assert len(part.feed.tokens) == rows
        child = chosen(5) if part.num_asked else NOT_ASKED
        drafter.answers(1 if rows == PREFILL_CHUNK else 2, child, step_s=step_s)
    assert drafter.known.steps.of(3) == 5.0
    assert drafter.known.steps.of(PREFILL_CHUNK) == 5.0, "beyond what was seen: as much as that"


# -- who has nothing to draft ---------------------------------------------------------------------


def test_who_is_done_says_so_while_the_others_are_drafted_for() -> None:
    drafter = drafter_of(opens(1), opens(2))
    drafter.ticks()
    drafter.answers(1, chosen(STOP), chosen(6))
    said, compute = drafter.ticks()
    assert isinstance(said, Send)
    assert isinstance(said.message, Draft)
    assert (said.message.session, said.message.done) == (1, True)
    assert isinstance(compute, Compute)
    assert [part.opened.session for part in compute.parts] == [2]


def test_each_text_that_has_no_answer_is_said_again_in_its_time() -> None:
    drafter = drafter_of(opens(1, policy=SYNC_4), opens(2, policy=SYNC_4))
    forwards(drafter, [{1: -0.1, 2: -0.1}] * 4)
    assert drafter.ticks() == [WaitUntil(WAIT_S_FIRST)] * 2
    drafter.now = 0.1
    drafter.hears(verdict(text(1), 50, 50, 50, 50, session=1, acked=2))
    drafter.now = WAIT_S_FIRST
    said, compute = drafter.ticks()
    assert isinstance(said, Send)
    assert isinstance(said.message, Draft)
    assert (said.message.session, said.message.tokens) == (2, (50,) * 4)
    assert isinstance(compute, Compute)
    assert [part.opened.session for part in compute.parts] == [1]


@pytest.mark.parametrize("first", [1, 2])
def test_a_text_that_rests_is_not_served_and_the_others_are(first: int) -> None:
    drafter = drafter_of(opens(1), opens(2))
    second = 3 - first
    drafter.hears(verdict(text(first), 5, session=first, cause=Cause.RESTING))
    assert sessions(drafter.ticks()) == [second]
    drafter.answers(1, chosen(6))
    drafter.hears(verdict((*text(first), 5), 6, session=first))
    assert sorted(sessions(drafter.ticks())) == [1, 2]
