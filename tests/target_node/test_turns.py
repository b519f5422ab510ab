"""Where passes run on the drafter's core too, the models take turns."""

import pytest

from node.events import Send
from node.placing import Place, Placing
from proto.messages import Cause, Limits, Policy, Verdict
from proto.policies import POLICIES
from target_node.compute import Compute
from target_node.deciding import NUM_FIRST
from tests.target_node.target import Target
from tests.texts import draft, opening

AUTO, TREE = POLICIES["auto"].make(), POLICIES["tree"].make()
LONG = Limits(max_len=900, stop_ids=())
PASS_S = {1: 0.030, 5: 0.034, 9: 0.050}


def after_a_pass(place: Place, policy: Policy = AUTO, *, has_drafters_core: bool = True) -> Target:
    """A target whose passes run there, that has verified a draft and told so."""
    placing = Placing(fixed=place, has_drafters_core=has_drafters_core)
    target = Target(pass_s=PASS_S, placing=placing)
    target.hears(opening(1, 2, policy=policy, limits=LONG))
    target.hears(draft((1, 2), 5, 6, number=1))
    target.ticks()
    return target


def told(target: Target, *tokens: int) -> Verdict:
    """The verdict of the pass that runs, in which the target chose these tokens."""
    (sent,) = (a for a in target.computes(1, *tokens, pass_s=0.034) if isinstance(a, Send))
    assert isinstance(sent.message, Verdict)
    return sent.message


def starts(target: Target) -> bool:
    """Whether a pass starts now."""
    return any(isinstance(action, Compute) for action in target.ticks())


def test_the_drafter_is_told_how_likely_its_drafts_must_be() -> None:
    told_least = told(after_a_pass(Place.SHARED), 5, 6, 7).least_chance
    assert told_least == pytest.approx((0.050 - 0.030) / 8 / 0.030), "a row per token"
    assert told(after_a_pass(Place.APART), 5, 6, 7).least_chance == 0.0
    assert told(after_a_pass(Place.SHARED, TREE), 5, 6, 7).least_chance == 0.0, "tree drafts ahead"
    on_own_cores = after_a_pass(Place.SHARED, has_drafters_core=False)
    assert told(on_own_cores, 5, 6, 7).least_chance == 0.0


def test_the_next_pass_starts_when_the_drafter_is_done_and_not_before() -> None:
    target = after_a_pass(Place.SHARED)
    assert told(target, 5, 6, 7).num_accepted == 2
    text = (1, 2, 5, 6, 7)
    target.hears(draft(text, 8, 9, 10, number=2))
    assert not starts(target), "more may come, and none during the pass"
    target.hears(draft(text, 8, 9, 10, number=3, first_number=1, done=True))
    (compute,) = target.ticks()
    assert isinstance(compute, Compute)
    assert compute.parts[0].num_asked == 4, "the last token, and its three drafts"
    (sent,) = (a for a in target.computes(2, 8, 9, 10, 11) if isinstance(a, Send))
    assert isinstance(sent.message, Verdict)
    assert (sent.message.cause, sent.message.num_accepted) == (Cause.READY, 3)


def test_a_drafter_that_drafts_ahead_is_not_waited_for_so_long() -> None:
    target = after_a_pass(Place.APART)
    told(target, 5, 6, 7)
    target.hears(draft((1, 2, 5, 6, 7), 8, 9, 10, number=2))
    assert starts(target)


def test_the_time_of_an_answer_is_that_of_its_first_step() -> None:
    target = after_a_pass(Place.SHARED)
    told(target, 5, 6, 7)
    assert not starts(target), "it waits"
    target.now += 0.010
    target.hears(draft((1, 2, 5, 6, 7), 8, 9, 10, number=2, model_us=6_000, num_steps=3, done=True))
    assert target.known.costs.reply.value == pytest.approx(0.010 - 2 * 0.002)


def test_a_verdict_that_is_said_again_says_too_that_they_take_turns() -> None:
    target = after_a_pass(Place.SHARED)
    first = told(target, 5, 6, 7)
    target.now += 5.0
    said = target.hears(draft((1, 2), 5, 6, number=2, first_number=1))
    (again,) = (action.message for action in said if isinstance(action, Send))
    assert isinstance(again, Verdict)
    assert (again.least_chance, again.num_awaited) == (first.least_chance, first.num_awaited)
    assert again.least_chance > 0


def test_drafts_that_came_after_all_end_the_waits_in_vain_before_the_next_is_priced() -> None:
    target = Target(pass_s=PASS_S)
    target.hears(opening(1, 2, policy=AUTO, limits=LONG))
    costs = target.known.costs
    costs.passed(1, 1, 1, 0.030, 0.030, is_plain=True)
    costs.draft.add(0.001)
    for _ in range(NUM_FIRST):
        costs.reply.add(9.0)  # no wait pays
    target.hears(draft((1, 2), 5, 6, number=1))
    target.ticks()
    for _ in range(20):
        target.machine._waiting.num_in_vain += 1
    assert told(target, 5, 6, 7).num_awaited == 0
