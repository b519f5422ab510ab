"""When drafts are sent, and where drafting stops."""

from dataclasses import replace

from drafter_node.compute import Compute
from drafter_node.sending import WAIT_S_FIRST, WAIT_S_MAX
from node.events import Send, WaitUntil
from proto.messages import Rule
from tests.drafter_node.drafter import Drafter
from tests.texts import PIPELINED, STOP, draft, opening, verdict


def test_what_the_target_cannot_use_yet_is_sent_in_groups() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, 3, policy=replace(PIPELINED, group=3)))
    sent = drafter.drafts(4, 5, 6, 7, 8)
    # The first of a life at once, then the one that starts a pass, then three at a time.
    assert [draft.tokens for draft in sent] == [(4,), (5,), (6, 7, 8)]
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    assert drafter.proposes(compute.ticket, 9) == []
    # A verdict makes what has been held back the next to be verified.
    (send,) = drafter.hears(verdict((1, 2, 3), 4, 5, 6, 7, acked=3, awaits=2))
    assert send == Send(draft((1, 2, 3, 4, 5, 6, 7, 8), 9, number=4))


def test_a_path_that_is_hardly_ever_taken_is_not_drafted_on() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, 3, policy=replace(PIPELINED, min_score=-1.2)))
    drafter.drafts(4, 5, 6)  # three tokens of e^-0.5 each: e^-1.5 is less than e^-1.2
    assert drafter.is_idle()
    # What has been accepted is certain, so there is room again.
    drafter.hears(verdict((1, 2, 3), 4, acked=3))
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)


def test_a_drafter_that_gives_up_before_a_pass_can_start_says_so() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, 3, policy=replace(PIPELINED, min_score=-0.4)))
    (first,) = drafter.drafts(4)
    assert not first.done
    (send,) = drafter.ticks()
    assert send == Send(draft((1, 2, 3), 4, number=2, first_number=1, done=True, num_steps=0))
    assert drafter.is_idle()


def test_under_the_classical_rules_no_draft_waits_for_a_later_one() -> None:
    policy = replace(PIPELINED, launch_min=3, group=3)
    drafter = Drafter()
    drafter.hears(replace(opening(1, 2, 3, policy=policy), rule=Rule.TOKEN))
    assert [draft.tokens for draft in drafter.drafts(4, 5, 6, 7)] == [(4,), (5,), (6,), (7,)]


def test_drafts_that_nobody_answers_are_said_again_ever_more_rarely() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, 3))
    drafter.drafts(4, 5, 6, 7)
    again = draft((1, 2, 3), 4, 5, 6, 7, number=3, first_number=1, num_steps=0)
    assert drafter.ticks() == [WaitUntil(WAIT_S_FIRST)]
    drafter.now = WAIT_S_FIRST
    assert drafter.ticks() == [Send(again)]
    assert drafter.ticks() == [WaitUntil(3 * WAIT_S_FIRST)]
    waits = []
    for number in range(4, 10):
        (wait,) = drafter.ticks()
        assert isinstance(wait, WaitUntil)
        waits.append(wait.deadline - drafter.now)
        drafter.now = wait.deadline
        assert drafter.ticks() == [Send(replace(again, number=number))]
    assert waits == sorted(waits)
    assert waits[-1] == WAIT_S_MAX


def test_how_soon_is_learnt_from_the_quickest_of_the_last_answers() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, 3))
    text = [1, 2, 3]
    for took_s in (0.3, 0.05, 0.2):
        sent = drafter.drafts(*range(4, 4 + 4))
        drafter.now += took_s
        drafter.hears(verdict(tuple(text), 9, acked=sent[-1].number))
        text.append(9)
    drafter.drafts(4, 5, 6, 7)
    assert drafter.ticks() == [WaitUntil(drafter.now + 4 * 0.05)]


def test_nothing_is_said_again_once_it_is_acknowledged() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, 3, policy=replace(PIPELINED, launch_min=1)))
    sent = drafter.drafts(4, STOP)  # nothing follows a token that ends the text
    assert drafter.is_idle()
    drafter.hears(verdict((1, 2, 3), 4, acked=sent[-1].number))
    drafter.now = 100.0
    assert drafter.ticks() == []
