"""Prices against dumb versions: a simulated text, and a trial of every number."""

import random

import pytest

from node.costs import SPENT_ON_TRIALS, Costs
from node.price import (
    NUM_BETWEEN,
    WAIT_S_MAX,
    WAIT_S_MIN,
    num_worth,
    tokens_per_second,
    wait_limit_s,
    waiting_pays,
)
from tests.texts import PIPELINED, SYNC_4


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("p", [0.3, 0.6, 0.9])
def test_the_formula_is_what_a_simulated_text_comes_to(p: float, first: int) -> None:
    draw = random.Random(1)
    most, pass_s, wait_s = 4, 3.0, 1.0
    tokens, time_s, has_drafts = 0, 0.0, False
    for _ in range(200_000):
        time_s += pass_s + (0.0 if has_drafts else wait_s)
        drafts = most if has_drafts else first
        accepted = next((i for i in range(drafts) if draw.random() >= p), drafts)
        tokens += accepted + 1
        has_drafts = accepted == drafts and draw.random() < p
    expected = tokens_per_second(p, first, most, pass_s, wait_s)
    assert tokens / time_s == pytest.approx(expected, rel=0.01)


def with_wait(wait_s: float) -> Costs:
    """A pass of three seconds, and a wait."""
    costs = Costs()
    costs.passed(1, 1, 3.0, 3.0)
    costs.waited(wait_s)
    return costs


def test_a_wait_that_is_short_beside_a_pass_pays_and_a_long_one_does_not() -> None:
    assert waiting_pays(0.6, 2, 4, with_wait(0.3))
    assert not waiting_pays(0.6, 2, 4, with_wait(2.0))
    # What is hardly ever right is worth no wait.
    assert not waiting_pays(0.05, 2, 4, with_wait(0.3))


def test_a_wait_is_at_least_a_pass_and_grows_with_the_cost_of_drafting() -> None:
    costs = Costs()
    assert wait_limit_s(SYNC_4, costs) == WAIT_S_MIN
    costs.passed(1, 1, 0.05, 0.05)
    assert wait_limit_s(SYNC_4, costs) == 0.05
    costs.draft.add(0.01)
    assert wait_limit_s(SYNC_4, costs) == 4 * 4 * 0.01
    costs.reply.add(9.0)
    assert wait_limit_s(SYNC_4, costs) == WAIT_S_MAX


def test_a_drafter_that_runs_ahead_is_worth_the_passes_that_it_can_save() -> None:
    costs = Costs()
    costs.passed(1, 1, 0.01, 0.01)
    costs.reply.add(1.0)
    assert wait_limit_s(PIPELINED, costs) == 0.02
    assert wait_limit_s(SYNC_4, costs) == WAIT_S_MAX


def known(passes: dict[int, float], *, token_s: float | None = None) -> Costs:
    """Some passes of each of these costs, written at this pace."""
    costs = Costs()
    for num_rows, seconds in sorted(passes.items()):
        for _ in range(20):
            costs.passed(num_rows, 1, seconds, token_s or seconds)
    return costs


def test_where_nothing_is_known_everything_is_verified() -> None:
    assert num_worth([0.1] * 8, 1, Costs()) == 8
    assert num_worth([0.1] * 8, 1, Costs({1: 1.0})) == 8, "what several rows cost was not seen yet"
    assert num_worth([0.1] * 8, 1, Costs({1: 1.0, 9: 5.0})) == 0
    assert num_worth([], 1, Costs({1: 1.0, 9: 5.0})) == 0


def test_where_drafts_always_pay_a_pass_goes_without_them_now_and_then() -> None:
    costs = known({1: 1.0, 9: 1.0})
    num_passes = 20
    while num_worth([0.9] * 8, 1, costs):
        costs.passed(9, 5, 1.0, 1.0)
        num_passes += 1
    assert num_passes == NUM_BETWEEN
    costs.passed(1, 1, 1.0, 1.0)
    assert num_worth([0.9] * 8, 1, costs) == 8


def test_it_is_the_number_that_makes_the_most_of_the_time() -> None:
    draw = random.Random(5)
    seen = set()
    for _ in range(300):
        passes = {1: 1.0}
        for num_rows in range(2, 10):
            passes[num_rows] = passes[num_rows - 1] + draw.choice((0.0, 0.02, 0.1, 0.5))
        chances = [draw.choice((0.05, 0.5, 0.9)) for _ in range(draw.randint(1, 8))]
        gains, chance, gain = [-passes[1] / 0.8], 1.0, 0.0
        for k, p in enumerate(chances, 1):
            chance *= p
            gain += chance
            gains.append(gain - passes[1 + k] / 0.8)
        best = num_worth(chances, 1, known(passes, token_s=0.8))
        assert gains[best] >= max(gains) - 1e-9
        seen.add(best)
    assert seen == set(range(9))


def test_plain_decoding_is_the_least_that_rows_are_compared_with() -> None:
    # Written badly so far, at 5 s a token; but a token a second is to be had at any time.
    assert num_worth([0.5] * 8, 1, known({1: 1.0, 9: 5.0}, token_s=5.0)) == 0


def test_a_fiftieth_of_the_time_goes_into_trials() -> None:
    costs = known({1: 1.0, 9: 5.0})
    num_passes = 0
    while num_worth([0.1] * 8, 1, costs) == 0:
        costs.passed(1, 1, 1.0, 1.0)
        num_passes += 1
    assert abs(num_passes - 4.0 / SPENT_ON_TRIALS) <= 1
    costs.passed(9, 1, 5.0, 5.0)
    assert num_worth([0.1] * 8, 1, costs) == 0
