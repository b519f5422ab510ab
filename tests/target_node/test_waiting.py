"""How long the target waits, and which drafts it has counted."""

import random

import pytest

from node.costs import Costs
from node.economics import FIRST_OF_MODEL, WAIT_S_MIN, Acceptance
from node.follower import WaitUntil
from proto.messages import Ack, Cause, Limits, Policy
from target_node.drafts import MAX_GAPS, Received
from target_node.waiting import NUM_FIRST, NUM_SKIPPED_MAX, Waiting
from tests.target_node.target import Target
from tests.texts import PIPELINED, SYNC_4, draft, name, opening


def waits(policy: Policy = PIPELINED, *, accepted: float = 0.6) -> tuple[Waiting, Costs]:
    """A text of this policy, whose drafts are right so often."""
    costs, acceptance = Costs(), Acceptance()
    draw = random.Random(2)
    for _ in range(200):
        acceptance.add(FIRST_OF_MODEL, right=draw.random() < accepted)
    return Waiting(opening(1, 2, policy=policy), costs, acceptance), costs


def heard(waiting: Waiting, now: float, *, first_of_life: bool = False) -> None:
    """A draft that answers the root (1, 2) comes."""
    waiting.heard(draft((1, 2), 5), now, first_of_life=first_of_life)


def test_nobody_is_waited_for_before_he_is_heard() -> None:
    waiting, _ = waits()
    assert waiting.reason(2, 1, is_late=False) is Cause.QUIET
    heard(waiting, 1.0)
    assert waiting.reason(2, 1, is_late=False) is None
    waiting.woke()
    assert waiting.reason(2, 1, is_late=False) is Cause.QUIET


def test_two_vain_waits_end_it_and_a_draft_begins_it_again() -> None:
    waiting, _ = waits()
    heard(waiting, 1.0)
    waiting.started(Cause.LATE, 1.0, 1.0)
    assert not waiting.is_over
    waiting.started(Cause.LATE, 1.0, 1.0)
    assert waiting.is_over
    heard(waiting, 2.0)
    assert not waiting.is_over


def test_a_prefill_does_not_make_later_waits_longer() -> None:
    prompt = tuple(range(100))
    target = Target()
    target.hears(opening(*prompt, policy=PIPELINED, limits=Limits(200, ())))
    assert len(target.ticks()) == 1
    target.computes(1, 7, pass_s=0.06)
    target.hears(draft((1,), 2))  # of no use, but it is heard
    (wait,) = target.ticks()
    assert isinstance(wait, WaitUntil)
    assert wait.deadline == target.now + WAIT_S_MIN


def test_a_late_answer_is_measured_too_and_only_the_first_one() -> None:
    waiting, costs = waits(SYNC_4)
    waiting.told(name(1, 2), 1.0)
    waiting.told(name(1, 2, 3), 1.1)
    heard(waiting, 1.2)  # answers (1, 2) after 0.2 s
    heard(waiting, 9.0)
    assert costs.reply.value == pytest.approx(0.2)
    assert waiting.limit_s(4) == pytest.approx(1.5 * 0.2 + 0.05)


def test_what_came_during_a_pass_is_not_how_long_the_first_answer_took() -> None:
    waiting, costs = waits()
    waiting.told(name(1, 2), 1.0)
    waiting.started(Cause.CHEAP, 1.0, 1.0)  # no message is looked for until it has ended
    waiting.heard(draft((1, 2), 5, model_us=3_000), 1.03, first_of_life=False)
    assert costs.reply.value == pytest.approx(0.003), "a step at least, and no more is known"
    waiting.told(name(1, 2), 2.0)
    waiting.began()
    heard(waiting, 2.005)
    assert costs.reply.value == pytest.approx(0.004)
    waiting.told(name(1, 2), 3.0)
    waiting.started(Cause.CHEAP, 3.0, 3.0)
    heard(waiting, 3.03)
    assert costs.reply.value == pytest.approx(0.004), "it may have taken as long as it usually does"


def test_the_first_draft_of_a_life_is_no_answer() -> None:
    waiting, costs = waits(SYNC_4)
    waiting.told(name(1, 2), 1.0)
    heard(waiting, 1.2, first_of_life=True)
    assert costs.reply.num == 0


def test_what_is_said_again_was_not_drafted_for_nothing() -> None:
    waiting, costs = waits(SYNC_4)
    waiting.heard(draft((1, 2), 5, 6, model_us=20_000), 1.0, first_of_life=True)
    waiting.heard(draft((1, 2), 5, 6, number=2, first_number=1), 1.0, first_of_life=False)
    assert costs.draft.value == 0.01


def ends_after(waiting: Waiting, wait_s: float) -> None:
    """A wait of so long ends with a draft."""
    waiting.began()
    heard(waiting, 100.0)
    waiting.started(Cause.READY, 100.0 - wait_s, 100.0)


def learnt(wait_s: float, accepted: float) -> tuple[Waiting, Costs]:
    """Passes take three seconds; how long waits are has been seen."""
    waiting, costs = waits(accepted=accepted)
    heard(waiting, 1.0)
    costs.passed(1, 1, 1, 3.0, 3.0, is_plain=True)
    for _ in range(NUM_FIRST):
        assert waiting.reason(2, 1, is_late=False) is None, "nothing is known yet"
        ends_after(waiting, wait_s)
    return waiting, costs


def is_cheap(waiting: Waiting) -> bool:
    """Whether it goes on alone because that promises more."""
    return waiting.reason(2, 1, is_late=False) is Cause.CHEAP


def test_what_is_not_waited_for_is_tried_again_now_and_then() -> None:
    waiting, costs = learnt(2.0, 0.6)
    for _ in range(NUM_SKIPPED_MAX):
        assert is_cheap(waiting)
        waiting.started(Cause.CHEAP, 0.0, 0.0)
        waiting.had_drafts()
    assert waiting.reason(2, 1, is_late=False) is None
    ends_after(waiting, 0.01)
    assert is_cheap(waiting), "one short wait among long ones"
    for _ in range(60):
        costs.waited(0.01)
    assert not is_cheap(waiting)


def test_a_wait_that_has_begun_is_not_given_up_before_its_limit() -> None:
    waiting, costs = learnt(0.3, 0.6)
    waiting.began()
    for _ in range(60):
        costs.waited(9.0)
    assert waiting.reason(2, 1, is_late=False) is None
    assert waiting.reason(2, 1, is_late=True) is Cause.LATE


@pytest.mark.parametrize(("accepted", "least", "most"), [(0.95, 1, 3), (0.6, 4, 7), (0.3, 8, 20)])
def test_drafts_that_should_have_been_there_are_waited_for(
    accepted: float, least: int, most: int
) -> None:
    waiting, _ = learnt(9.0, accepted)
    num_skipped = 0
    while is_cheap(waiting):
        waiting.started(Cause.CHEAP, 0.0, 0.0)
        num_skipped += 1
    assert least <= num_skipped <= most
    waiting.had_drafts()
    assert is_cheap(waiting)


def test_what_others_decide_teaches_a_text_nothing() -> None:
    waiting, costs = learnt(2.0, 0.6)
    for _ in range(2 * NUM_SKIPPED_MAX):
        waiting.began()
        waiting.went_along(0.0)
    assert is_cheap(waiting), "neither skipped nor in vain"
    ends_after(waiting, 2.0)
    assert costs.wait.value == pytest.approx(2.0), "up to the draft, not to the pass"


def test_drafts_that_are_hardly_ever_right_are_not_missed() -> None:
    waiting, _ = learnt(9.0, 0.02)
    for _ in range(NUM_SKIPPED_MAX):
        assert is_cheap(waiting)
        waiting.started(Cause.CHEAP, 0.0, 0.0)


def test_acks_stop_at_a_gap() -> None:
    received = Received()
    for number in (1, 2, 4, 5):
        received.add(draft((1,), 5, number=number))
    assert received.acks() == (Ack(0, 1, 2),)
    received.add(draft((1,), 5, number=3))
    assert received.acks() == (Ack(0, 1, 5),)


def test_a_message_that_stands_for_several_numbers_closes_the_gap() -> None:
    received = Received()
    received.add(draft((1,), 5, number=4))
    received.add(draft((1,), 5, first_number=1, number=6))
    assert received.acks() == (Ack(0, 1, 6),)


def test_a_new_life_counts_anew_and_an_old_one_no_more() -> None:
    received = Received()
    assert received.add(draft((1,), 5, number=1))
    assert not received.add(draft((1,), 5, number=2))
    assert received.add(draft((1,), 5, number=1, incarnation=3))
    assert not received.add(draft((1,), 5, number=3))
    assert received.acks() == (Ack(0, 3, 1),)


def test_only_so_many_gaps_are_remembered() -> None:
    received = Received()
    for number in range(3, 3 + 4 * MAX_GAPS, 2):
        received.add(draft((1,), 5, number=number))
    received.check()
    received.add(draft((1,), 5, first_number=1, number=3 + 4 * MAX_GAPS))
    assert received.acks() == (Ack(0, 1, 3 + 4 * MAX_GAPS),)
