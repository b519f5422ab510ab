"""Thousands of fault schedules, one per seed. `make sim SEED=n` replays one and tells its story.

`make sim SEED="0 9999"` runs ten thousand and tells which of them fail.
"""

import os
from collections import Counter

import pytest

from proto.messages import Rule
from tests.simulation.run import simulate
from tests.simulation.scenario import draw
from tests.simulation.story import Line

NUM_SEEDS = int(os.environ.get("SLIPSTREAM_SIMULATION_SEEDS", "120"))
NUM_SLOW_SEEDS = 1500
NUM_ORACLE_SEEDS = 60
BLOCK = 20


def seen_in(seeds: range, policy: str | None = None) -> Counter[str]:
    """What the judge has seen in these seeds, every one of which ends with all of its texts."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        stats = simulate(seed, policy)
        assert stats["texts"] == len(draw(seed, policy).texts)
        seen += stats
    return seen


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 2 * BLOCK))
def test_every_seed_ends_with_the_text_of_the_target_alone(first: int) -> None:
    seeds = range(first, min(first + 2 * BLOCK, NUM_SEEDS))
    seen = seen_in(seeds)
    # And the liveness of many texts is really looked at.
    assert seen["texts"] > 2 * len(seeds)
    assert seen["outlived the bad time"] > len(seeds)
    assert seen["accepted again"] > len(seeds) // 16
    assert seen["copied"] > len(seeds) // 8


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.slow if first > NUM_SEEDS else pytest.mark.long)
        for first in range(NUM_SEEDS, NUM_SLOW_SEEDS, 10 * BLOCK)
    ],
)
def test_many_more_seeds_do(first: int) -> None:
    assert seen_in(range(first, min(first + 10 * BLOCK, NUM_SLOW_SEEDS)))["accepted again"] > 0


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.long if first + BLOCK < NUM_ORACLE_SEEDS else ())
        for first in range(0, NUM_ORACLE_SEEDS, BLOCK)
    ],
)
def test_a_drafter_that_is_always_right_is_soon_of_use_again(first: int) -> None:
    for seed in range(first, first + BLOCK):
        assert simulate(seed, oracle=True)["texts"] == len(draw(seed, oracle=True).texts)


@pytest.mark.parametrize("seed", [6641, 6894])
def test_a_detour_that_comes_before_the_first_choice_contradicts_nobody(seed: int) -> None:
    assert simulate(seed)["texts"] == len(draw(seed).texts)


def test_a_coordinator_that_dies_goes_on_with_its_journal_and_clients_get_each_token_once() -> None:
    seeds = [seed for seed in range(100) if draw(seed).faults.deaths]
    seen: Counter[str] = Counter()
    for seed in seeds[:12]:
        stats = simulate(seed)
        assert stats["texts"] == len(draw(seed).texts)
        seen += stats
    assert seen["coordinator died"] >= 8
    assert seen["taken up"] >= 8
    assert seen["resumed"] >= 8


@pytest.mark.parametrize("policy", ["ar", "sync"])
def test_every_policy_writes_the_same_text(policy: str) -> None:
    assert seen_in(range(10), policy)["texts"] > 20


def test_texts_are_copied_from_each_other() -> None:
    lookups = {seed: draw(seed).lookup for seed in range(200)}
    remembering = [seed for seed, lookup in lookups.items() if lookup and lookup.remember]
    seen: Counter[str] = Counter()
    for seed in remembering[:12]:
        seen += simulate(seed)
    assert seen["copied from earlier texts"] > 0


def test_many_texts_wait_for_others_and_many_have_two_drafters() -> None:
    scenarios = [draw(seed) for seed in range(200)]
    assert sum(one.num_drafters == 2 for one in scenarios) > 30
    assert sum(len(one.texts) > 2 and one.submit_every_s == 0.0 for one in scenarios) > 20
    classical = [one for one in scenarios if one.rule is not Rule.COUPLED]
    assert sum(one.num_drafters == 2 and one.policy.has_drafter for one in classical) > 5


def test_most_nodes_hear_messages_during_a_forward_and_one_in_four_does_not() -> None:
    num_blocking = sum(draw(seed).blocking for seed in range(1000))
    assert 200 < num_blocking < 300


def test_drafters_that_have_other_tokens_are_of_as_much_use() -> None:
    drawn = [draw(seed) for seed in range(400)]
    assert 30 < sum(one.languages is not None for one in drawn) < 100
    seed = 124  # nothing is lost there, and the drafter is always right
    num_new = sum(one.limits.max_len - len(one.prompt) for one in drawn[seed].texts)
    assert drawn[seed].languages is not None
    assert simulate(seed)["translated"] > 0.75 * num_new
    assert simulate(138, oracle=True)["accepted again"] > 0


def test_readers_that_leave_early_leave_the_other_texts_as_they_are() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        stats = simulate(seed, leaving=True)
        assert stats["texts"] == len(draw(seed).texts)
        seen += stats
    assert seen["left by their readers"] > 40


def test_pipelined_does_too_and_its_drafters_rest_and_wake_up() -> None:
    seen = seen_in(range(30), "pipelined")
    assert seen["cause RESTING"] > 30
    assert seen["cause READY"] > 100


def test_models_that_take_turns_on_a_core_use_their_drafts() -> None:
    seen = seen_in(
        [seed for seed in range(400) if draw(seed, "pipelined").takes_turns][:30], "pipelined"
    )
    assert seen["in turns"] > 100
    assert seen["accepted in turns"] > 100


def test_a_drafter_that_never_gets_ahead_is_waited_for() -> None:
    # It is always right and always one pass late: to go on alone brings nothing.
    assert simulate(8151, plain=True, chain=True)["accepted again"] >= 2


def test_a_seed_is_the_same_story_every_time() -> None:
    first: list[Line] = []
    second: list[Line] = []
    simulate(3, tell=first.append)
    simulate(3, tell=second.append)
    assert len(first) > 100
    assert list(map(str, first)) == list(map(str, second))
