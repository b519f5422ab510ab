"""Prices against dumb versions: a simulated text, and a trial of every number."""

import itertools
import random
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import pytest

from node.costs import NOTHING_KNOWN, SPENT_ON_TRIALS, Costs, Passes, Prices
from node.economics import (
    NEARLY_SURE,
    NUM_BETWEEN,
    TOO_UNLIKELY,
    WAIT_S_MAX,
    WAIT_S_MIN,
    least_chance,
    num_rows_worth,
    rows_worth,
    tokens_per_second,
    verifying_pays,
    wait_limit_s,
    waiting_pays,
    worth_holding_s,
)


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


def with_wait(wait_s: float) -> Prices:
    """A pass of three seconds, and a wait."""
    costs = Costs()
    costs.passed(1, 1, 1, 3.0, 3.0, is_plain=True)
    costs.waited(wait_s)
    return costs.at()


def test_a_wait_that_is_short_beside_a_pass_pays_and_a_long_one_does_not() -> None:
    assert waiting_pays(0.6, 2, 4, with_wait(0.3))
    assert not waiting_pays(0.6, 2, 4, with_wait(2.0))
    # What is hardly ever right is worth no wait.
    assert not waiting_pays(0.05, 2, 4, with_wait(0.3))


def test_a_wait_is_at_least_a_pass_and_grows_with_the_cost_of_drafting() -> None:
    costs = Costs()
    assert wait_limit_s(4, costs.at(), is_ahead=False) == WAIT_S_MIN
    costs.passed(1, 1, 1, 0.05, 0.05, is_plain=True)
    assert wait_limit_s(4, costs.at(), is_ahead=False) == 0.05
    costs.draft.add(0.01)
    # So long that four times as long would be seen: half as much again, and some more.
    assert wait_limit_s(4, costs.at(), is_ahead=False) == pytest.approx(1.5 * 4 * 0.01 + 0.05)
    costs.reply.add(9.0)
    assert wait_limit_s(4, costs.at(), is_ahead=False) == WAIT_S_MAX


def test_a_drafter_that_runs_ahead_is_worth_the_passes_that_it_can_save() -> None:
    costs = Costs()
    costs.passed(1, 1, 1, 0.01, 0.01, is_plain=True)
    costs.reply.add(1.0)
    assert wait_limit_s(2, costs.at(), is_ahead=True) == 0.02
    assert wait_limit_s(4, costs.at(), is_ahead=False) == pytest.approx(1.55)


@pytest.mark.parametrize("usual_s", [0.0005, 0.004, 0.016])
def test_nearby_an_answer_has_four_times_as_long_as_usual(usual_s: float) -> None:
    costs = Costs()
    for _ in range(20):
        costs.reply.add(usual_s)
    assert wait_limit_s(1, costs.at(), is_ahead=False) == pytest.approx(max(0.002, 4 * usual_s))


def test_far_away_an_answer_has_a_little_longer_than_slow_ones_take() -> None:
    costs = Costs()
    for index in range(32):
        # Every eighth is late, because something was lost; the others differ a little.
        costs.reply.add(0.9 if index % 8 == 7 else 0.20 + 0.01 * (index % 4))
    assert 0.3 < wait_limit_s(1, costs.at(), is_ahead=False) < 0.42


def known(took: dict[int, float], *, token_s: float | None = None) -> Passes:
    """Some passes of each of these costs, written at this pace."""
    passes = Passes(NOTHING_KNOWN)
    for num_rows, seconds in sorted(took.items()):
        for _ in range(20):
            passes.passed(num_rows, 1, seconds, token_s or seconds, is_plain=num_rows == 1)
    return passes


def num_worth(chances: Sequence[float], num_fixed: int, passes: Passes) -> int:
    """How many of a chain of drafts of the only text are worth their rows."""
    (number,) = rows_worth([list(accumulate(chances, mul))], num_fixed, 1, passes)
    return number


def test_where_nothing_is_known_everything_is_verified() -> None:
    chances = [0.1] * 8
    assert num_worth(chances, 1, Passes(NOTHING_KNOWN)) == 8
    assert num_worth(chances, 1, Passes({1: 1.0})) == 8, "what several rows cost was not seen yet"
    assert num_worth(chances, 1, Passes({1: 1.0, 9: 5.0})) == 0
    assert num_worth([], 1, Passes({1: 1.0, 9: 5.0})) == 0
    assert rows_worth([chances, [0.2]], 2, 2, Passes(NOTHING_KNOWN)) == [8, 1]
    assert rows_worth([[], []], 2, 2, Passes({1: 1.0})) == [0, 0]


def test_where_drafts_always_pay_a_pass_goes_without_them_now_and_then() -> None:
    passes = known({1: 1.0, 9: 1.0})
    num_passes = 20
    while num_worth([0.9] * 8, 1, passes):
        passes.passed(9, 5, 1.0, 1.0, is_plain=False)
        num_passes += 1
    assert num_passes == NUM_BETWEEN
    assert rows_worth([[0.9] * 4, [0.9] * 3], 2, 2, passes) == [0, 0]
    beside_others = rows_worth([[0.9] * 4, [0.9] * 3], 6, 3, passes, may_be_plain=False)
    assert beside_others == [4, 3], "the pass has the drafts of another text anyway"
    passes.passed(1, 1, 1.0, 1.0, is_plain=True)
    assert num_worth([0.9] * 8, 1, passes) == 8


def test_it_is_the_number_that_makes_the_most_of_the_time() -> None:
    draw = random.Random(5)
    seen = set()
    for _ in range(300):
        took = {1: 1.0}
        for num_rows in range(2, 10):
            took[num_rows] = took[num_rows - 1] + draw.choice((0.0, 0.02, 0.1, 0.5))
        chances = [draw.choice((0.05, 0.5, 0.9)) for _ in range(draw.randint(1, 8))]
        gains, chance, gain = [-took[1] / 0.8], 1.0, 0.0
        for k, p in enumerate(chances, 1):
            chance *= p
            gain += chance
            gains.append(gain - took[1 + k] / 0.8)
        best = num_worth(chances, 1, known(took, token_s=0.8))
        assert gains[best] >= max(gains) - 1e-9
        seen.add(best)
    assert seen == set(range(9))


def test_for_several_texts_it_is_the_best_of_all_ways_to_share_the_rows() -> None:
    draw = random.Random(7)
    seen = set()
    for _ in range(150):
        num_texts = draw.randint(2, 3)
        took = {num_texts: 1.0}
        for num_rows in range(num_texts + 1, num_texts + 10):
            took[num_rows] = took[num_rows - 1] + draw.choice((0.0, 0.02, 0.1, 0.3))
        chains = [
            [draw.choice((0.05, 0.3, 0.5, 0.9, 1.0)) for _ in range(draw.randint(0, 3))]
            for _ in range(num_texts)
        ]
        best = rows_worth(
            [list(accumulate(chain, mul)) for chain in chains],
            num_texts,
            num_texts,
            known(took, token_s=0.3),
        )
        every = itertools.product(*(range(len(chain) + 1) for chain in chains))
        token_s = min(0.3, 1.0 / num_texts)
        most = max(worth(chains, counts, took, token_s) for counts in every)
        assert worth(chains, best, took, token_s) >= most - 1e-9
        seen.add(sum(best))
    assert len(seen) > 5


def worth(
    chains: Sequence[Sequence[float]], counts: Sequence[int], took: dict[int, float], token_s: float
) -> float:
    """What so many drafts of each text are expected to bring, less what their rows cost."""
    pairs = zip(chains, counts, strict=True)
    gain = sum(sum(accumulate(chain[:count], mul)) for chain, count in pairs)
    return gain - took[len(chains) + sum(counts)] / token_s


def test_the_likeliest_drafts_of_all_texts_have_the_rows() -> None:
    passes = known({2: 1.0, 3: 1.01, 4: 1.02, 9: 9.0})
    assert rows_worth([[0.9, 0.81], [0.5, 0.45]], 2, 2, passes) == [2, 0]
    assert rows_worth([[0.4, 0.36], [0.9, 0.18]], 2, 2, passes) == [1, 1]


def test_plain_decoding_is_the_least_that_rows_are_compared_with() -> None:
    # Written badly so far, at 5 s a token; but a token a second is to be had at any time.
    assert num_worth([0.5] * 8, 1, known({1: 1.0, 9: 5.0}, token_s=5.0)) == 0
    # So are two of two texts.
    assert rows_worth([[0.3], [0.3]], 2, 2, known({2: 1.0, 4: 1.4}, token_s=5.0)) == [0, 0]
    assert rows_worth([[0.3], [0.3]], 2, 1, known({2: 1.0, 4: 1.4}, token_s=5.0)) == [1, 1]


def test_a_fiftieth_of_the_time_goes_into_trials() -> None:
    passes = known({1: 1.0, 9: 5.0})
    num_passes = 0
    while num_worth([0.1] * 8, 1, passes) == 0:
        passes.passed(1, 1, 1.0, 1.0, is_plain=True)
        num_passes += 1
    assert abs(num_passes - 4.0 / SPENT_ON_TRIALS) <= 1
    passes.passed(9, 1, 5.0, 5.0, is_plain=False)
    assert num_worth([0.1] * 8, 1, passes) == 0


def test_a_pass_is_held_as_long_as_what_it_would_make_is_worth() -> None:
    # Four tokens in a pass of a second are one in a quarter; two more are worth half a second.
    assert worth_holding_s(4.0, 2.0, 1.0) == 0.5
    assert worth_holding_s(4.0, 0.0, 1.0) == 0.0
    assert worth_holding_s(4.0, 2.0, 0.0) == 0.0, "what a pass takes is not known"


def test_held_for_less_more_tokens_a_second_are_written_and_held_for_more_fewer() -> None:
    draw = random.Random(3)
    for _ in range(200):
        now, more, pass_s, hold_s = (draw.uniform(0.1, 4.0) for _ in range(4))
        is_better = (now + more) / (pass_s + hold_s) > now / pass_s
        assert (hold_s < worth_holding_s(now, more, pass_s)) is is_better


def test_as_many_texts_share_a_step_as_make_the_most_of_it() -> None:
    draw = random.Random(11)
    seen = set()
    for _ in range(200):
        took = {1: 1.0}
        for num_rows in range(2, 9):
            took[num_rows] = took[num_rows - 1] + draw.choice((0.0, 0.1, 0.4, 1.0))
        chances = sorted((draw.random() for _ in range(draw.randint(1, 8))), reverse=True)
        rates = [sum(chances[:n]) / took[n] for n in range(1, len(chances) + 1)]
        number = num_rows_worth(chances, Passes(took))
        assert rates[number - 1] == pytest.approx(max(rates))
        seen.add(number)
    assert seen == set(range(1, 9))


def test_where_no_step_was_timed_all_texts_share_one() -> None:
    assert num_rows_worth([0.9, 0.1, 0.01], Passes(NOTHING_KNOWN)) == 3


def test_drafts_pay_where_their_rows_cost_less_than_the_tokens_they_bring() -> None:
    passes = Passes({1: 1.0, 8: 1.6, 10: 1.8, 12: 3.0})
    assert verifying_pays(0.9, 2, 1, passes), "1.7 tokens for hardly more than nothing"
    # A token of eight costs a fifth of a second; so do two more rows, and four cost 1.4.
    assert verifying_pays(0.7, 2, 8, passes)
    assert not verifying_pays(0.5, 2, 8, passes)
    assert not verifying_pays(0.9, 4, 8, passes)
    assert verifying_pays(0.0, 2, 1, Passes({})), "nothing is known"


def test_in_turns_a_node_is_expanded_if_it_saves_more_than_a_step_and_a_row() -> None:
    cheap, dear = (Costs({1: 0.030, 9: longer_s}).at() for longer_s in (0.030, 0.110))
    for costs in (cheap, dear):
        costs.draft.add(0.003)
    assert least_chance(1, cheap) == pytest.approx(0.003 / 0.030), "a step of a token's seconds"
    assert least_chance(1, dear) == pytest.approx((0.003 + 0.010) / 0.030)
    dear.draft.add(0.500)
    assert least_chance(1, dear) == NEARLY_SURE, "the likeliest node is expanded all the same"
    assert least_chance(1, Costs().at()) == TOO_UNLIKELY, "nothing is known"
