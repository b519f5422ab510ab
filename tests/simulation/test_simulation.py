"""Thousands of fault schedules, one per seed. `make sim SEED=n` replays one and tells its story."""

import os
from collections import Counter

import pytest

from tests.simulation.run import simulate
from tests.simulation.story import Line

NUM_SEEDS = int(os.environ.get("SLIPSTREAM_SIMULATION_SEEDS", "200"))
NUM_SLOW_SEEDS = 3000
BLOCK = 20
# Seeds that showed a mistake once. What each of them showed is in the commit that mended it.
TELLING_SEEDS = (0, 19, 81, 167, 200, 321, 413, 663, 685, 759, 794, 899, 1183, 1475, 1516, 1873)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BLOCK))
def test_every_seed_ends_with_the_text_of_the_target_alone(first: int) -> None:
    for seed in range(first, min(first + BLOCK, NUM_SEEDS)):
        assert simulate(seed)["texts"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("first", range(NUM_SEEDS, NUM_SLOW_SEEDS, 10 * BLOCK))
def test_many_more_seeds_do(first: int) -> None:
    for seed in range(first, min(first + 10 * BLOCK, NUM_SLOW_SEEDS)):
        assert simulate(seed)["texts"] == 2


@pytest.mark.parametrize("seed", TELLING_SEEDS)
def test_a_seed_that_once_failed_stays_mended(seed: int) -> None:
    assert simulate(seed)["texts"] == 2


@pytest.mark.parametrize("policy", ["ar", "sync", "pipelined"])
def test_every_policy_writes_the_same_text(policy: str) -> None:
    for seed in range(10):
        assert simulate(seed, policy)["texts"] == 2


def test_the_liveness_of_many_texts_is_really_looked_at() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        seen += simulate(seed)
    assert seen["texts"] == 200
    assert seen["outlived the bad time"] > 100
    assert seen["accepted again"] > 20


def test_a_seed_is_the_same_story_every_time() -> None:
    first: list[Line] = []
    second: list[Line] = []
    simulate(3, tell=first.append)
    simulate(3, tell=second.append)
    assert len(first) > 100
    assert list(map(str, first)) == list(map(str, second))
