"""What is measured, and what follows of it where nothing was."""

import pytest

from node.acceptance import FIRST_OF_MODEL, MAX_TRIES, PRIOR_OF_MODEL, Acceptance
from node.costs import Costs, Mean
from proto.messages import MODEL_SOURCE, NGRAM_SOURCE


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
    costs = Costs({1: 1.0, 5: 3.0, 9: 4.0})
    assert costs.pass_of(3) == 2.0
    assert costs.pass_of(7) == 3.5
    assert costs.pass_of(30) == 4.0
    assert Costs().pass_of(3) == 0.0


def test_what_was_timed_before_the_first_text_is_no_usual_pass() -> None:
    costs = Costs({1: 1.0})
    assert costs.pass_s == 0.0
    costs.passed(1, 1, 3.0, 3.0)
    assert costs.pass_s == 3.0
    assert costs.pass_of(1) == 2.0


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
    assert acceptance.chance((MODEL_SOURCE, 1)) == PRIOR_OF_MODEL / 2


def test_kinds_are_learnt_apart_and_old_tries_fade() -> None:
    acceptance = Acceptance()
    for _ in range(500):
        acceptance.add(FIRST_OF_MODEL, right=False)
        acceptance.check()
    assert acceptance.chance(FIRST_OF_MODEL) < 0.01
    assert acceptance.chance((MODEL_SOURCE, 1)) == PRIOR_OF_MODEL / 2
    for _ in range(int(MAX_TRIES)):
        acceptance.add(FIRST_OF_MODEL, right=True)
    assert acceptance.chance(FIRST_OF_MODEL) > 0.6
