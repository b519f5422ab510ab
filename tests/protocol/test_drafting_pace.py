"""When drafts are sent, and where drafting stops."""

from dataclasses import replace

from drafter_node.events import Compute, Send
from proto.messages import Rule
from tests.protocol.drafter import Drafter
from tests.protocol.texts import PIPELINED, draft, opening, verdict


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
    (send,) = drafter.hears(verdict((1, 2, 3), 4, 5, 6, 7, acked=3))
    assert send == Send(draft((1, 2, 3, 4, 5, 6, 7, 8), 9, number=4))


def test_a_path_that_is_hardly_ever_taken_is_not_drafted_on() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, 3, policy=replace(PIPELINED, min_score=-1.2)))
    drafter.drafts(4, 5, 6)  # three tokens of e^-0.5 each: e^-1.5 is less than e^-1.2
    assert drafter.ticks() == []
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
    assert send == Send(draft((1, 2, 3), 4, number=2, first_number=1, done=True))
    assert drafter.ticks() == []


def test_under_the_classical_rules_no_draft_waits_for_a_later_one() -> None:
    policy = replace(PIPELINED, launch_min=3, group=3)
    drafter = Drafter()
    drafter.hears(replace(opening(1, 2, 3, policy=policy), rule=Rule.TOKEN))
    assert [draft.tokens for draft in drafter.drafts(4, 5, 6, 7)] == [(4,), (5,), (6,), (7,)]
