"""What is measured, and what follows of it where nothing was."""

from math import exp
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.costs import (
    MOST_SLOWED,
    NOTHING_KNOWN,
    SPENT_ON_TRIALS,
    Costs,
    Durations,
    Mean,
    Passes,
    crowd,
    rising,
)
from node.economics import (
    FIRST_OF_MODEL,
    MAX_TRIES,
    PRIOR_OF_MODEL,
    Acceptance,
    kind_of_score,
    waiting_pays,
)
from proto.messages import NGRAM_SOURCE


def test_a_mean_begins_as_the_plain_mean_and_then_follows_what_changes() -> None:
    mean = Mean()
    assert (mean.value, mean.num) == (0.0, 0)
    for value in (1.0, 2.0, 6.0):
        mean.add(value)
    assert mean.value == pytest.approx(3.0)
    for _ in range(100):
        mean.add(50.0)
    assert mean.value == pytest.approx(50.0, rel=0.01)


def test_what_was_not_seen_costs_what_its_neighbours_say() -> None:
    passes = Passes({1: 1.0, 5: 3.0, 9: 4.0})
    assert passes.of(3) == 2.0
    assert passes.of(7) == 3.5
    assert passes.of(30) == 4.0
    assert Passes(NOTHING_KNOWN).of(3) == 0.0


def test_a_forward_of_more_rows_than_any_yet_is_expected_in_proportion_to_them() -> None:
    durations = Durations({1: 0.1, 9: 0.4})
    assert durations.of(1) == 0.1
    assert durations.of(15) == 0.4
    assert durations.of(100) == 8 * 0.4
    durations.took(128, 9.0)
    assert durations.of(128) == durations.of(200) == 9.0
    assert durations.of(512) == 4 * 9.0
    assert Durations({9: 0.4}).of(1) == 0.4, "fewer rows than any take no longer"
    assert Durations().of(128) == 0.0, "of nothing nothing follows"


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.1, 10.0)), max_size=12))
def test_rising_values_never_fall_and_have_the_same_mean(values: list[tuple[float, float]]) -> None:
    found, weights = rising(values), [weight for _, weight in values]
    assert found == sorted(found)
    assert len(found) == len(values)
    means = [value for value, _ in values]
    assert sum(map(mul, found, weights)) == pytest.approx(sum(map(mul, means, weights)))
    if means == sorted(means):
        assert found == means


def test_what_was_timed_once_gives_way_to_what_more_rows_took_often() -> None:
    passes = Passes({1: 5.0, 5: 5.5, 9: 6.0})
    for _ in range(20):
        passes.took(6, 3.4)
    assert passes.of(5) < 3.8, "five rows take no longer than six"
    assert passes.of(1) < 3.8
    assert passes.of(9) == 6.0, "of more rows nothing else is known"


def test_where_no_pass_has_run_yet_those_on_the_other_cores_count() -> None:
    costs = Costs()
    costs.passed(1, 1, 1, 3.0, 3.0, is_plain=True, place=1)
    for _ in range(20):
        costs.waited(0.0)
    assert costs.pass_s(0) == 3.0
    assert waiting_pays(0.6, 2, 4, costs.at(0)), "it costs nothing to wait"
    costs.passed(1, 1, 1, 5.0, 5.0, is_plain=True, place=0)
    assert costs.pass_s(0) == costs.at(0).pass_s == 5.0
    assert costs.pass_s(1) == costs.at(1).pass_s == 3.0


def test_what_was_timed_before_the_first_text_is_no_usual_pass() -> None:
    costs = Costs({1: 1.0})
    assert costs.pass_s() == 0.0
    costs.passed(1, 1, 1, 3.0, 3.0, is_plain=True)
    assert costs.pass_s() == 3.0
    assert costs.passes(1).of(1) == 2.0


def test_what_passes_cost_is_learnt_for_each_number_of_texts() -> None:
    costs = Costs({1: 1.0})
    for _ in range(20):
        costs.passed(3, 4, 3, 9.0, 9.0, is_plain=False)
    assert costs.passes(4).of(4) == costs.passes(3).of(4) == pytest.approx(9.0)
    assert costs.passes(4).token.value == pytest.approx(3.0)
    for num_texts in (1, 2, 5):
        assert costs.passes(num_texts).of(4) == 1.0, "as it was timed before the first text"
        assert costs.passes(num_texts).token.num == 0


def test_about_as_many_texts_are_alike() -> None:
    assert [crowd(num_texts) for num_texts in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 16]


def test_a_pass_without_drafts_saves_up_for_trials_and_one_with_them_spends_it() -> None:
    passes = Passes(NOTHING_KNOWN)
    passes.passed(3, 1, 1.0, 1.0, is_plain=True)
    assert (passes.num_since_plain, passes.for_trials_s) == (0, SPENT_ON_TRIALS)
    passes.passed(3, 1, 1.0, 1.0, is_plain=False)
    assert (passes.num_since_plain, passes.for_trials_s) == (1, 0.0)


def test_waits_that_are_left_out_are_counted_until_one_is_made() -> None:
    costs = Costs()
    costs.skipped()
    costs.skipped()
    assert (costs.num_skipped, costs.wait.num) == (2, 0)
    costs.waited(0.5)
    assert (costs.num_skipped, costs.wait.value) == (0, 0.5)


def test_longer_matches_are_trusted_more_until_it_is_known() -> None:
    acceptance = Acceptance()
    chances = [acceptance.chance((NGRAM_SOURCE, n)) for n in (1, 2, 3)]
    assert chances == [1 / 2, 2 / 3, 3 / 4]
    assert acceptance.chance(FIRST_OF_MODEL) == PRIOR_OF_MODEL
    assert acceptance.chance(kind_of_score(-2.0)) == pytest.approx(exp(-2.0), rel=0.2)


def test_kinds_are_learnt_apart_and_old_tries_fade() -> None:
    acceptance = Acceptance()
    for _ in range(500):
        acceptance.add(FIRST_OF_MODEL, right=False)
        acceptance.check()
    assert acceptance.chance(FIRST_OF_MODEL) < 0.01
    assert acceptance.chance(kind_of_score(-2.0)) == pytest.approx(exp(-2.0), rel=0.2)
    for _ in range(int(MAX_TRIES)):
        acceptance.add(FIRST_OF_MODEL, right=True)
    assert acceptance.chance(FIRST_OF_MODEL) > 0.6


def test_where_no_drafter_computes_what_slows_some_passes_slows_those_that_were_not_made() -> None:
    timed = {1: 0.004, 2: 0.004, 5: 0.006, 9: 0.010}
    alone, beside = Passes(timed, is_alone=True), Passes(timed)
    for passes in (alone, beside):
        assert passes.of(1) == 0.004, "as timed"
        for _ in range(5):
            passes.passed(5, 2, 0.009, 0.009, is_plain=False)
    assert alone.of(5) == pytest.approx(0.009)
    assert alone.of(1) == pytest.approx(0.006)
    assert alone.of(9) == pytest.approx(0.015)
    assert beside.of(1) == 0.004
    for _ in range(3):
        alone.passed(1, 1, 0.005, 0.005, is_plain=True)
    assert alone.of(1) == pytest.approx(0.005), "what was made counts, and not the time at load"


def test_more_rows_than_were_timed_say_nothing_of_those_that_were() -> None:
    crowd = Passes({1: 0.004, 16: 0.006}, is_alone=True)
    crowd.passed(64, 20, 0.030, 0.030, is_plain=False)
    assert crowd.of(16) == 0.006
    crowd.passed(12, 10, 0.0068, 0.0068, is_plain=False)
    assert 0.006 < crowd.of(16) < 0.009


def test_times_at_load_are_never_lowered_and_raised_in_bounds() -> None:
    timed = {1: 0.004, 5: 0.006}
    quick, slow = Passes(timed, is_alone=True), Passes(timed, is_alone=True)
    quick.passed(3, 2, 0.001, 0.001, is_plain=False)
    assert quick.of(5) == 0.006
    slow.passed(3, 2, 5.0, 5.0, is_plain=False)
    assert slow.of(1) == pytest.approx(0.004 * MOST_SLOWED)
