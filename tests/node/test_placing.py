"""Which cores passes run on, by invented times."""

import random
from math import exp
from statistics import mean

import pytest

from node.placing import CLEARLY, FIRST_S, NUM_TRIAL, Contest, Place, Placing

APART, SHARED = Place.APART, Place.SHARED


def run(contest: Contest, seconds: dict[Place, float], lasting: float) -> dict[Place, float]:
    """Passes of two tokens for `lasting` seconds; the seconds spent on each place."""
    spent = dict.fromkeys(Place, 0.0)
    while sum(spent.values()) < lasting:
        place = contest.place
        contest.passed(place, 2.0, seconds[place])
        spent[place] += seconds[place]
    return spent


@pytest.mark.parametrize("first", list(Place))
@pytest.mark.parametrize("faster", list(Place))
def test_the_faster_place_is_found_and_trials_cost_little(first: Place, faster: Place) -> None:
    contest = Contest(first)
    times = {faster: 0.030, faster.other: 0.045}
    run(contest, times, 3.0)
    assert contest.standing is faster
    spent = run(contest, times, 100.0)
    assert 0.0 < spent[faster.other] < 4.0


def test_a_place_that_is_hardly_faster_changes_nothing() -> None:
    contest = Contest(APART)
    run(contest, {APART: 0.030, SHARED: 0.030 / (CLEARLY - 0.01)}, 60.0)
    assert contest.standing is APART


def test_chance_changes_nothing() -> None:
    contest = Contest(APART)
    noise = random.Random(1)
    num_changes, before = 0, APART
    for _ in range(20_000):
        contest.passed(contest.place, 1 + 3 * noise.random(), 0.02 + noise.expovariate(50))
        num_changes += contest.standing is not before
        before = contest.standing
    assert num_changes <= 6


def test_a_trial_that_is_far_slower_ends_early() -> None:
    contest = Contest(APART)
    slow_s = 3.0
    spent = run(contest, {APART: 0.030, SHARED: slow_s}, 60.0)
    assert contest.standing is APART
    assert spent[SHARED] / slow_s < NUM_TRIAL / 2


def test_when_other_work_takes_a_core_the_choice_is_taken_again() -> None:
    contest = Contest(APART)
    quiet, busy = {APART: 0.045, SHARED: 0.030}, {APART: 0.050, SHARED: 0.300}
    run(contest, quiet, 120.0)
    assert contest.standing is SHARED
    spent = run(contest, busy, 60.0)
    assert contest.standing is APART
    assert spent[SHARED] < 0.3 * NUM_TRIAL * 4
    run(contest, quiet, 120.0)
    assert contest.standing is SHARED


def test_where_everything_becomes_slow_alike_trials_do_not_go_on() -> None:
    contest = Contest(SHARED)
    run(contest, {APART: 0.045, SHARED: 0.030}, 120.0)
    spent = run(contest, {APART: 0.45, SHARED: 0.30}, 200.0)
    assert contest.standing is SHARED
    assert spent[APART] < 20.0


def test_the_first_pass_after_a_change_says_nothing() -> None:
    contest = Contest(APART)
    while contest.place is APART:
        contest.passed(APART, 2.0, 0.030)
    contest.passed(SHARED, 2.0, 0.040)  # cold
    for _ in range(NUM_TRIAL):
        assert contest.place is SHARED
        contest.passed(SHARED, 2.0, 0.020)
    contest.passed(APART, 2.0, 0.010)  # nor does the first one back
    for _ in range(NUM_TRIAL):
        assert contest.place is APART
        contest.passed(APART, 2.0, 0.030)
    assert contest.standing is SHARED
    assert contest.known_s == pytest.approx(0.020)


@pytest.mark.parametrize(("again_s", "winner"), [(0.010, APART), (0.020, SHARED)])
def test_a_stall_before_a_trial_decides_nothing(again_s: float, winner: Place) -> None:
    contest = Contest(APART)
    while contest.place is APART:
        contest.passed(APART, 2.0, 0.2)
    while contest.place is SHARED:
        contest.passed(SHARED, 2.0, 0.015)
    assert contest.evidence.is_sure
    for _ in range(NUM_TRIAL + 1):
        contest.passed(APART, 2.0, again_s)
    assert contest.standing is winner


def wrong_share(slower: float, seed: int) -> float:
    """The share of 4,000 passes at which the slower place stands, on a machine with stalls.

    slower  seconds of a pass on `SHARED` over those on `APART`
    """
    random_ = random.Random(seed)
    contest = Contest(Place(seed % 2))
    drift, stalled, num_wrong = 0.0, 0, 0
    for _ in range(4000):
        drift = 0.97 * drift + 0.024 * random_.gauss(0, 1)  # a tenth, over some 30 passes
        if random_.random() < 1 / 300:
            stalled = random_.choice((5, 10, 20))
        seconds = 0.0025 * exp(drift + random_.gauss(0, 0.1)) * (5 if stalled else 1)
        stalled = max(0, stalled - 1)
        place = contest.place
        contest.passed(place, 1.0, seconds * (slower if place is SHARED else 1.0))
        num_wrong += contest.standing is (SHARED if slower > 1 else APART)
    return num_wrong / 4000


@pytest.mark.parametrize("slower", [0.8, 0.87, 1.15, 1.25])
def test_the_faster_place_stands_on_a_machine_with_stalls(slower: float) -> None:
    # Without the second look at the standing place the wrong one stands for 13 to 20 %.
    assert mean(wrong_share(slower, seed) for seed in range(20)) < 0.1


def test_passes_with_drafts_and_without_are_compared_apart() -> None:
    placing = Placing()
    for _ in range(2000):
        for is_drafted, faster in ((True, APART), (False, SHARED)):
            place = placing.place_for("kind", is_drafted=is_drafted)
            seconds = 0.03 if place is faster else 0.05
            placing.passed("kind", place, 1.0, seconds, is_drafted=is_drafted)
    contests = placing._contests
    assert contests["kind", True].standing is APART
    assert contests["kind", False].standing is SHARED


def test_the_first_choice_follows_the_times_at_load() -> None:
    assert Placing().first(is_drafted=True) is APART
    assert Placing().first(is_drafted=False) is SHARED
    memory_bound = Placing({APART: {1: 0.10, 5: 0.11}, SHARED: {1: 0.05, 5: 0.06}})
    assert memory_bound.first(is_drafted=True) is SHARED
    small = Placing({APART: {1: 0.0015, 5: 0.0020}, SHARED: {1: 0.0016, 5: 0.0018}})
    assert small.first(is_drafted=True) is APART
    assert small.first(is_drafted=False) is APART


@pytest.mark.parametrize("is_drafted", [True, False])
def test_a_first_trial_that_would_cost_much_waits_until_it_is_worth_it_or_times_change(
    *, is_drafted: bool
) -> None:
    measured = {APART: {1: 0.10, 5: 0.11}, SHARED: {1: 0.05, 5: 0.06}}
    quiet, busy = {APART: 0.11, SHARED: 0.06}, {APART: 0.11, SHARED: 0.30}

    def apart_s(placing: Placing, lasting: float, times: dict[Place, float]) -> float:
        """Passes for so many seconds; how many of them were spent apart."""
        spent = dict.fromkeys(Place, 0.0)
        while sum(spent.values()) < lasting:
            place = placing.place_for("kind", is_drafted=is_drafted)
            placing.passed("kind", place, 2.0, times[place], is_drafted=is_drafted)
            spent[place] += times[place]
        return spent[APART]

    placing = Placing(measured)
    assert apart_s(placing, 10.0, quiet) == 0
    assert 0 < apart_s(placing, 20.0, quiet) < 0.5
    placing = Placing(measured)
    assert apart_s(placing, 2.0, quiet) == 0
    assert apart_s(placing, 6.0, busy) > 1.0  # other work took a core
    assert placing.place_for("kind", is_drafted=is_drafted) is APART


def test_a_fixed_place_holds_for_passes_with_drafts_alone() -> None:
    placing = Placing(fixed=APART)
    for number in range(100):
        assert placing.place_for(number, is_drafted=True) is APART
    assert placing.place_for(0, is_drafted=False) is SHARED


def test_cores_that_the_user_has_named_are_all_used_until_measured_otherwise() -> None:
    placing = Placing(usual=SHARED)
    for is_drafted in (True, False):
        assert placing.first(is_drafted=is_drafted) is SHARED


def test_models_take_turns_only_where_they_share_a_core() -> None:
    assert Placing(has_drafters_core=True).takes_turns(SHARED)
    assert not Placing(has_drafters_core=True).takes_turns(APART)
    assert not Placing().takes_turns(SHARED)


def passes_until_the_other(placing: Placing, *, is_crowd: bool, most: int) -> int:
    """How many passes of 10 ms run on the first place, at most so many."""
    first = placing.place_for("plain", is_drafted=False)
    for number in range(most):
        place = placing.place_for("plain", is_drafted=False)
        if place is not first:
            return number
        placing.passed("plain", place, 16.0, 0.010, is_drafted=False, is_crowd=is_crowd)
    return most


def test_in_a_crowd_the_other_place_is_tried_at_once_and_not_again_and_again() -> None:
    measured = {APART: {1: 0.010}, SHARED: {1: 0.009}}
    alone, crowd = Placing(measured), Placing(measured)
    assert passes_until_the_other(alone, is_crowd=False, most=40) == 40
    assert passes_until_the_other(crowd, is_crowd=True, most=40) <= NUM_TRIAL + 1
    for _ in range(NUM_TRIAL + 2):  # the trial, in which both are the same
        place = crowd.place_for("plain", is_drafted=False)
        crowd.passed("plain", place, 16.0, 0.010, is_drafted=False, is_crowd=True)
    most = round(FIRST_S / 0.010)
    assert passes_until_the_other(crowd, is_crowd=True, most=most) >= most - 2
