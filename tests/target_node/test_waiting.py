"""How long the target waits, and which drafts it has counted."""

from proto.messages import Ack, Cause, Limits
from target_node.events import WaitUntil
from target_node.patience import WAIT_S_MAX, WAIT_S_MIN, Patience
from target_node.received import MAX_GAPS, Received
from tests.target_node.target import Target
from tests.texts import PIPELINED, SYNC_4, draft, name, opening


def heard(patience: Patience, now: float, *, first_of_life: bool = False) -> None:
    """A draft that answers the root (1, 2) comes."""
    patience.heard(draft((1, 2), 5), now, first_of_life=first_of_life)


def test_nobody_is_waited_for_before_he_is_heard() -> None:
    patience = Patience()
    assert patience.is_over
    heard(patience, 1.0)
    assert not patience.is_over
    patience.opened(opening(1, 2))
    assert patience.is_over


def test_two_vain_waits_end_it_and_a_draft_begins_it_again() -> None:
    patience = Patience()
    heard(patience, 1.0)
    patience.started(Cause.LATE, 1.0)
    assert not patience.is_over
    patience.started(Cause.LATE, 1.0)
    assert patience.is_over
    heard(patience, 2.0)
    assert not patience.is_over


def test_an_unmeasured_wait_is_short() -> None:
    assert Patience().limit_s(SYNC_4) == WAIT_S_MIN


def test_a_wait_is_at_least_a_pass() -> None:
    patience = Patience()
    patience.told(name(1, 2), 1.0, pass_s=0.05)
    assert patience.limit_s(SYNC_4) == 0.05


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


def test_a_wait_grows_with_the_cost_of_drafting() -> None:
    patience = Patience()
    patience.heard(draft((1, 2), 5, 6, model_us=20_000), 1.0, first_of_life=True)
    assert patience.limit_s(SYNC_4) == 4 * 4 * 0.01


def test_a_late_answer_is_measured_too() -> None:
    patience = Patience()
    patience.told(name(1, 2), 1.0, pass_s=0.01)
    patience.told(name(1, 2, 3), 1.1, pass_s=0.01)
    heard(patience, 1.2)  # answers (1, 2) after 0.2 s
    assert abs(patience.limit_s(SYNC_4) - 0.8) < 1e-9


def test_the_first_draft_of_a_life_is_no_answer() -> None:
    patience = Patience()
    patience.told(name(1, 2), 1.0, pass_s=0.01)
    heard(patience, 1.2, first_of_life=True)
    assert patience.limit_s(SYNC_4) == 0.01


def test_a_drafter_that_runs_ahead_is_worth_the_passes_that_it_can_save() -> None:
    patience = Patience()
    patience.told(name(1, 2), 1.0, pass_s=0.01)
    heard(patience, 2.0)
    assert patience.limit_s(PIPELINED) == 0.02
    assert patience.limit_s(SYNC_4) == WAIT_S_MAX


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
