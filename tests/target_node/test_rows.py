"""How many drafts are worth their rows, against the dumb version that tries every number."""

import random

from target_node.rows import NUM_BETWEEN, SPENT_ON_TRIALS, Rows


def known(costs: dict[int, float], *, token_s: float | None = None) -> Rows:
    """Rows after some passes of each of these costs, written at this pace."""
    rows = Rows({})
    for num_rows, seconds in sorted(costs.items()):
        for _ in range(20):
            rows.passed(num_rows, 1, seconds, token_s or seconds)
    rows.passed(max(costs), 1, costs[max(costs)], token_s or costs[max(costs)])
    return rows


def test_where_nothing_is_known_everything_is_verified() -> None:
    assert Rows({}).num_worth([0.1] * 8, 1) == 8
    assert Rows({1: 1.0}).num_worth([0.1] * 8, 1) == 8, "what several rows cost was not seen yet"
    assert Rows({1: 1.0, 9: 5.0}).num_worth([0.1] * 8, 1) == 0
    assert Rows({1: 1.0, 9: 5.0}).num_worth([], 1) == 0


def test_where_drafts_always_pay_a_pass_goes_without_them_now_and_then() -> None:
    rows = known({1: 1.0, 9: 1.0})
    num_passes = 1
    while rows.num_worth([0.9] * 8, 1):
        rows.passed(9, 5, 1.0, 1.0)
        num_passes += 1
    assert abs(num_passes - NUM_BETWEEN) <= 20
    rows.passed(1, 1, 1.0, 1.0)
    assert rows.num_worth([0.9] * 8, 1) == 8


def test_what_was_not_seen_costs_what_its_neighbours_say() -> None:
    rows = known({1: 1.0, 5: 3.0, 9: 4.0})
    assert rows.seconds(3) == 2.0
    assert rows.seconds(7) == 3.5
    assert rows.seconds(30) == 4.0


def test_it_is_the_number_that_makes_the_most_of_the_time() -> None:
    draw = random.Random(5)
    seen = set()
    for _ in range(300):
        costs = {1: 1.0}
        for num_rows in range(2, 10):
            costs[num_rows] = costs[num_rows - 1] + draw.choice((0.0, 0.02, 0.1, 0.5))
        chances = [draw.choice((0.05, 0.5, 0.9)) for _ in range(draw.randint(1, 8))]
        rows = known(costs, token_s=0.8)
        gains, chance, gain = [-costs[1] / 0.8], 1.0, 0.0
        for k, p in enumerate(chances, 1):
            chance *= p
            gain += chance
            gains.append(gain - costs[1 + k] / 0.8)
        best = rows.num_worth(chances, 1)
        assert gains[best] >= max(gains) - 1e-9
        seen.add(best)
    assert seen == set(range(9))


def test_plain_decoding_is_the_least_that_rows_are_compared_with() -> None:
    # Written badly so far, at 5 s a token; but a token a second is to be had at any time.
    rows = known({1: 1.0, 9: 5.0}, token_s=5.0)
    assert rows.num_worth([0.5] * 8, 1) == 0


def test_a_fiftieth_of_the_time_goes_into_trials() -> None:
    rows = known({1: 1.0, 9: 5.0})
    num_passes = 0
    while rows.num_worth([0.1] * 8, 1) == 0:
        rows.passed(1, 1, 1.0, 1.0)
        num_passes += 1
    assert abs(num_passes - 4.0 / SPENT_ON_TRIALS) <= 1
    rows.passed(9, 1, 5.0, 5.0)
    assert rows.num_worth([0.1] * 8, 1) == 0
