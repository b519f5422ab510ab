"""How long the target waits, and which drafts it has counted."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from node.costs import Costs
from node.economics import FIRST_OF_MODEL, WAIT_S_MIN, Acceptance
from node.events import WaitUntil
from proto.messages import Ack, Cause, Limits, Policy, Rule
from target_node.deciding import NUM_FIRST, NUM_SKIPPED_MAX, Start, TextView, View, Wait, decide
from target_node.drafts_at_hand import MAX_GAPS, Received
from target_node.waiting import QUIET_FIRST, Waiting
from tests.target_node.target import Target, part_of, said
from tests.texts import PIPELINED, SYNC_4, draft, name, opening


class Text:
    """A text of this policy without a draft, whose drafts are right so often; what is measured."""

    def __init__(self, policy: Policy = PIPELINED, *, accepted: float = 0.6) -> None:
        self.policy, self.costs, self._acceptance = policy, Costs(), Acceptance()
        draw = random.Random(2)
        for _ in range(200):
            self._acceptance.add(FIRST_OF_MODEL, right=draw.random() < accepted)
        self.waiting = Waiting(self.costs)

    def hears(self, now: float, *, first_of_life: bool = False) -> None:
        """A draft that answers the root (1, 2) comes."""
        self.waiting.heard(draft((1, 2), 5), now, first_of_life=first_of_life)

    def decided(self, now: float, wanted: int = 2) -> Start | Wait:
        """What is decided at `now`, if a pass could have started at 0.0."""
        of_waiting = {
            name: getattr(self.waiting, name) for name in ("has_begun", "is_quiet", "num_in_vain")
        }
        text = TextView(
            session=1,
            policy=self.policy,
            rule=Rule.COUPLED,
            rests=False,
            is_trial=False,
            is_catching_up=False,
            most=4,
            num_awaited=wanted,
            num_in_row=0,
            are_there=False,
            are_all=False,
            ready_at=0.0,
            num_missing=1,
            went_along=False,
            takes_turns=False,
            **of_waiting,
        )
        p = self._acceptance.chance(FIRST_OF_MODEL)
        view = View((text,), None, False, None, 1, p, self.costs.at(), None)
        action = decide(view, now).action
        assert isinstance(action, Start | Wait)
        return action

    def reason(self, *, is_late: bool) -> Cause | None:
        """Why a pass starts with fewer drafts than two; None: it waits on."""
        match self.decided(1e9 if is_late else 0.0):
            case Start(causes):
                return causes[1]
        return None


def test_nobody_is_waited_for_before_he_is_heard() -> None:
    text = Text()
    waiting = text.waiting
    assert text.reason(is_late=False) is Cause.QUIET
    text.hears(1.0)
    assert text.reason(is_late=False) is None
    waiting.woke()
    assert text.reason(is_late=False) is Cause.QUIET


def test_two_vain_waits_end_it_and_a_draft_begins_it_again() -> None:
    text = Text()
    waiting = text.waiting
    text.hears(1.0)
    waiting.started(Cause.LATE, 1.0, 1.0)
    assert not waiting.is_quiet
    waiting.started(Cause.LATE, 1.0, 1.0)
    assert waiting.is_quiet
    text.hears(2.0)
    assert not waiting.is_quiet


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
    text = Text(SYNC_4)
    waiting, costs = text.waiting, text.costs
    waiting.told(name(1, 2), 1.0)
    waiting.told(name(1, 2, 3), 1.1)
    text.hears(1.2)  # answers (1, 2) after 0.2 s
    text.hears(9.0)
    assert costs.reply.value == pytest.approx(0.2)
    assert text.decided(0.0, 4) == Wait(pytest.approx(1.5 * 0.2 + 0.05))


def test_what_came_during_a_pass_is_not_how_long_the_first_answer_took() -> None:
    text = Text()
    waiting, costs = text.waiting, text.costs
    waiting.told(name(1, 2), 1.0)
    waiting.started(Cause.CHEAP, 1.0, 1.0)  # no message is looked for until it has ended
    waiting.heard(draft((1, 2), 5, model_us=3_000), 1.03, first_of_life=False)
    assert costs.reply.value == pytest.approx(0.003), "a step at least, and no more is known"
    waiting.told(name(1, 2), 2.0)
    waiting.began()
    text.hears(2.005)
    assert costs.reply.value == pytest.approx(0.004)
    waiting.told(name(1, 2), 3.0)
    waiting.started(Cause.CHEAP, 3.0, 3.0)
    text.hears(3.03)
    assert costs.reply.value == pytest.approx(0.004), "it may have taken as long as it usually does"


def test_the_first_draft_of_a_life_is_no_answer() -> None:
    text = Text(SYNC_4)
    waiting, costs = text.waiting, text.costs
    waiting.told(name(1, 2), 1.0)
    text.hears(1.2, first_of_life=True)
    assert costs.reply.num == 0


def test_what_is_said_again_was_not_drafted_for_nothing() -> None:
    text = Text(SYNC_4)
    waiting, costs = text.waiting, text.costs
    waiting.heard(draft((1, 2), 5, 6, model_us=20_000), 1.0, first_of_life=True)
    again = draft((1, 2), 5, 6, number=2, first_number=1, num_steps=0)
    waiting.heard(again, 1.0, first_of_life=False)
    assert (costs.draft.value, costs.draft.num) == (0.01, 1)


def test_a_last_message_with_new_drafts_counts() -> None:
    text = Text(SYNC_4)
    waiting, costs = text.waiting, text.costs
    waiting.heard(draft((1, 2), 5, 6, model_us=20_000), 1.0, first_of_life=True)
    last = draft((1, 2), 5, 6, 7, number=2, first_number=1, done=True, num_steps=1, model_us=30_000)
    waiting.heard(last, 1.0, first_of_life=False)
    assert costs.draft.num == 2
    assert costs.draft.value > 0.01


def test_a_pass_of_others_is_no_part_of_a_wait_or_of_an_answer() -> None:
    text = Text(SYNC_4)
    waiting, costs = text.waiting, text.costs
    costs.reply.add(0.004)
    waiting.told(name(1, 2), 1.0)
    waiting.began()
    waiting.left_out(1.001)  # a pass of another text, which takes five seconds
    text.hears(6.001)
    assert costs.reply.value == pytest.approx(0.004), "as long as it usually takes"
    waiting.began()
    waiting.started(Cause.READY, 1.0, 6.001)
    assert costs.wait.num == 0


def test_a_wait_after_one_that_was_cut_is_measured() -> None:
    text = Text(SYNC_4)
    waiting, costs = text.waiting, text.costs
    waiting.began()
    waiting.left_out(1.0)
    waiting.started(Cause.LATE, 1.0, 2.0)
    waiting.began()
    text.hears(3.5)
    waiting.started(Cause.READY, 3.0, 3.5)
    assert (costs.wait.num, costs.wait.value) == (1, 0.5)


def ends_after(text: Text, wait_s: float) -> None:
    """A wait of so long ends with a draft."""
    text.waiting.began()
    text.hears(100.0)
    text.waiting.started(Cause.READY, 100.0 - wait_s, 100.0)


def learnt(wait_s: float, accepted: float) -> Text:
    """Passes take three seconds; how long waits are has been seen."""
    text = Text(accepted=accepted)
    text.hears(1.0)
    text.costs.passed(1, 1, 1, 3.0, 3.0, is_plain=True)
    for _ in range(NUM_FIRST):
        assert text.reason(is_late=False) is None, "nothing is known yet"
        ends_after(text, wait_s)
    return text


def is_cheap(text: Text) -> bool:
    """Whether it goes on alone because that promises more."""
    return text.reason(is_late=False) is Cause.CHEAP


def test_what_is_not_waited_for_is_tried_again_now_and_then() -> None:
    text = learnt(2.0, 0.6)
    waiting, costs = text.waiting, text.costs
    for _ in range(NUM_SKIPPED_MAX):
        assert is_cheap(text)
        waiting.started(Cause.CHEAP, 0.0, 0.0)
        waiting.had_drafts()
    assert text.reason(is_late=False) is None
    ends_after(text, 0.01)
    assert is_cheap(text), "one short wait among long ones"
    for _ in range(60):
        costs.waited(0.01)
    assert not is_cheap(text)


def test_a_wait_that_has_begun_is_not_given_up_before_its_limit() -> None:
    text = learnt(0.3, 0.6)
    waiting, costs = text.waiting, text.costs
    waiting.began()
    for _ in range(60):
        costs.waited(9.0)
    assert text.reason(is_late=False) is None
    assert text.reason(is_late=True) is Cause.LATE


@pytest.mark.parametrize(("accepted", "least", "most"), [(0.95, 1, 3), (0.6, 4, 7), (0.3, 8, 20)])
def test_drafts_that_should_have_been_there_are_waited_for(
    accepted: float, least: int, most: int
) -> None:
    text = learnt(9.0, accepted)
    waiting = text.waiting
    num_skipped = 0
    while is_cheap(text):
        waiting.started(Cause.CHEAP, 0.0, 0.0)
        num_skipped += 1
    assert least <= num_skipped <= most
    waiting.had_drafts()
    assert is_cheap(text)


def test_what_others_decide_teaches_a_text_nothing() -> None:
    text = learnt(2.0, 0.6)
    waiting, costs = text.waiting, text.costs
    for _ in range(2 * NUM_SKIPPED_MAX):
        waiting.began()
        waiting.went_along(0.0)
    assert is_cheap(text), "neither skipped nor in vain"
    ends_after(text, 2.0)
    assert costs.wait.value == pytest.approx(2.0), "up to the draft, not to the pass"


def test_drafts_that_are_hardly_ever_right_are_not_missed() -> None:
    text = learnt(9.0, 0.02)
    waiting = text.waiting
    for _ in range(NUM_SKIPPED_MAX):
        assert is_cheap(text)
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


def test_a_silent_drafter_is_waited_for_now_and_then_and_less_often_each_time() -> None:
    target = Target()
    limits = replace(opening(1, 2).limits, max_len=200)
    target.hears(opening(1, 2, policy=PIPELINED, limits=limits))
    causes: list[Cause] = []
    for token in range(3, 63):
        actions = target.ticks()
        if isinstance(actions[0], WaitUntil):
            target.now = actions[0].deadline
            actions = target.ticks()
        number = part_of(actions).number
        causes.append(said(target.computes(number, token, pass_s=0.5)).cause)
    late = [place for place, cause in enumerate(causes) if cause is Cause.LATE]
    gaps = [after - before - 1 for before, after in pairwise(late)]
    assert gaps == [2 * QUIET_FIRST, 4 * QUIET_FIRST]
    assert late[0] == QUIET_FIRST
    assert set(causes) == {Cause.LATE, Cause.QUIET}
