"""The ratio of two arms: its interval contains the truth as often as it says."""

import random
import warnings
from math import exp, isclose, log

import pytest

from lab.experiments.results.ratios import Cell, Ratio, interval, interval_again, paired

TRUTH = 1.3


def speeds(
    draw: random.Random,
    *,
    prompts: int,
    repetitions: int = 1,
    by_prompt: float = 0.2,
    noise: float = 0.05,
    drift: float = 0.0,
) -> tuple[dict[Cell, float], dict[Cell, float]]:
    """Of an arm that is 1.3 times as fast as its baseline, and of that."""
    own, base = {}, {}
    differs = [draw.gauss(0, by_prompt) for _ in range(prompts)]
    for repetition in range(repetitions):
        for prompt in range(prompts):
            cell = Cell(prompt, repetition)
            slow = -drift * len(own) / (prompts * repetitions)
            base[cell] = 40 * exp(slow + draw.gauss(0, noise))
            own[cell] = 40 * TRUTH * exp(slow + differs[prompt] + draw.gauss(0, noise))
    return own, base


def found(own: dict[Cell, float], base: dict[Cell, float]) -> Ratio:
    ratio = paired(own, base)
    assert ratio is not None
    return ratio


def limits(ratio: Ratio) -> tuple[float, float]:
    assert ratio.low is not None
    assert ratio.high is not None
    return ratio.low, ratio.high


@pytest.mark.parametrize(("prompts", "repetitions"), [(6, 1), (12, 3), (20, 1)])
def test_nineteen_of_twenty_intervals_contain_the_ratio(prompts: int, repetitions: int) -> None:
    draw, count, held = random.Random(7), 300, 0
    for _ in range(count):
        own, base = speeds(draw, prompts=prompts, repetitions=repetitions)
        low, high = limits(found(own, base))
        held += low <= TRUTH <= high
    assert 0.90 <= held / count <= 0.99


def test_repetitions_of_a_prompt_are_no_other_prompts() -> None:
    """Were each repetition a unit, the interval would be a third as wide with ten of them."""
    own, base = speeds(random.Random(1), prompts=8, repetitions=1, noise=0.0)
    once = found(own, base)
    again = {Cell(cell.prompt, number): own[cell] for cell in own for number in range(10)}
    plain = {Cell(cell.prompt, number): base[cell] for cell in base for number in range(10)}
    often = found(again, plain)
    assert (once.num_pairs, often.num_pairs) == (8, 80)
    assert (often.num_units, often.unit) == (8, "prompts")
    assert limits(often) == pytest.approx(limits(once))


def test_a_drift_of_the_machine_is_not_in_pairs() -> None:
    own, base = speeds(random.Random(2), prompts=10, by_prompt=0.0, noise=0.01, drift=1.0)
    ratio = found(own, base)
    assert ratio.mean == pytest.approx(TRUTH, rel=0.02)
    assert ratio.half_width is not None
    assert ratio.half_width < 0.02
    shuffled = dict(zip(own, random.Random(3).sample(list(own.values()), len(own)), strict=True))
    loose = found(shuffled, base)
    assert loose.half_width is not None
    assert loose.half_width > 10 * ratio.half_width


def test_two_runs_of_the_same_have_intervals_that_overlap() -> None:
    draw, overlaps = random.Random(4), 0
    for _ in range(40):
        first, second = (limits(found(*speeds(draw, prompts=10))) for _ in range(2))
        overlaps += first[0] <= second[1] and second[0] <= first[1]
    assert overlaps >= 36


def test_arms_that_change_places_have_the_inverse_ratio() -> None:
    own, base = speeds(random.Random(5), prompts=9)
    there, back = found(own, base), found(base, own)
    assert isclose(there.mean * back.mean, 1)
    low, high = limits(back)
    assert limits(there) == pytest.approx((1 / high, 1 / low), rel=0.02)


def test_an_arm_that_is_its_baseline_is_one_without_a_warning() -> None:
    own, _ = speeds(random.Random(6), prompts=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ratio = found(own, dict(own))
        assert (ratio.mean, limits(ratio), ratio.median) == (1, (1, 1), 1)


def test_of_a_single_cell_nothing_is_known_of_the_spread() -> None:
    ratio = found({Cell(0, 0): 60.0}, {Cell(0, 0): 40.0})
    assert ratio.mean == pytest.approx(1.5)
    assert (ratio.low, ratio.high, ratio.half_width, ratio.is_rough) == (None, None, None, True)


@pytest.mark.parametrize("values", [[0.0, 0.1], [0.1, 0.1, 0.1, 0.1, 0.2], [0.3, 0.3 + 1e-12]])
def test_the_mean_lies_within_however_odd_the_values(values: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limit = interval(values)
    assert limit is not None
    mean = sum(values) / len(values)
    assert limit[0] - 1e-9 <= mean <= limit[1] + 1e-9


def test_cells_without_a_counterpart_are_left_out_and_counted() -> None:
    own, base = speeds(random.Random(8), prompts=8, by_prompt=0.0, noise=0.0)
    own[Cell(0, 0)] = 4000.0
    del base[Cell(0, 0)]
    base[Cell(99, 0)] = 1.0
    ratio = found(own, base)
    assert ratio.mean == pytest.approx(TRUTH)
    assert (ratio.num_pairs, ratio.num_unpaired) == (7, 1)
    assert paired({Cell(0, 0): 1.0}, {Cell(1, 0): 1.0}) is None


def test_the_turns_of_a_conversation_are_one_pair() -> None:
    own = {Cell(0, 0, 0): 20.0, Cell(0, 0, 1): 80.0, Cell(1, 0, 0): 40.0}
    ratio = found(own, dict.fromkeys(own, 10.0))
    assert ratio.num_pairs == 2
    assert log(ratio.mean) == pytest.approx(log(4))
    assert (ratio.unit, ratio.num_units) == ("measurements", 2)


@pytest.mark.parametrize("repetitions", [2, 3, 5])
def test_another_run_of_the_same_prompts_is_about_in_its_own_interval(repetitions: int) -> None:
    draw, count, held = random.Random(3), 150, 0
    widths = []
    for _ in range(count):
        differs = [draw.gauss(0, 0.3) for _ in range(12)]
        truth = sum(differs) / len(differs)
        made = [[one + draw.gauss(0, 0.05) for _ in range(repetitions)] for one in differs]
        again = interval_again(made)
        assert again is not None
        held += again[0] <= truth <= again[1]
        widths.append(again[1] - again[0])
    assert 0.88 * count <= held <= 0.99 * count
    assert max(widths) < 0.1, "how much prompts differ does not count"


def test_of_a_prompt_that_was_run_once_nothing_is_known_of_another_run() -> None:
    assert interval_again([[0.1, 0.2], [0.3]]) is None
    assert interval_again([]) is None
    assert interval_again([[0.1, 0.1], [0.3, 0.3]]) == pytest.approx((0.2, 0.2))
    own, base = speeds(random.Random(1), prompts=6, repetitions=2)
    ratio = found(own, base)
    assert ratio.again_low is not None
    assert ratio.again_high is not None
    assert limits(ratio)[0] < ratio.again_low < ratio.mean < ratio.again_high < limits(ratio)[1]
    assert ratio.again_words == f"{ratio.again_low:.2f}-{ratio.again_high:.2f}"
    assert found(*speeds(random.Random(1), prompts=6)).again_words == ""
