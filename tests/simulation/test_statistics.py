"""The distribution of many short texts through the real machines is the target's.

The planted biases show at 1,000 to 4,000 texts; 5,000 of each case find less than those.
`python -m tests.simulation.statistics 100000` writes twenty times as many, which takes hours.
"""

import pytest

from tests.simulation.biases import BIASES, Bias, DraftsAgain
from tests.simulation.sampled import Sampling
from tests.simulation.statistics import CASES, LEVEL, Case, Result, run

NUM_TEXTS = 500
NUM_TEXTS_SLOW = 5_000


def by_name(what: Case | Bias) -> str:
    return what.name


def assert_exact(case: Case, result: Result) -> None:
    assert result.passes, f"{case.name}: p = {result.p_value}"
    if case.rule.name != "COUPLED":  # where the machine itself compares, nothing is judged here
        assert result.num_judged > result.num_texts
        least = 0.3 if case.lookup is None else 0.1
        assert least < result.num_accepted / result.num_judged < 0.9


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_the_texts_are_distributed_as_the_targets(case: Case) -> None:
    assert_exact(case, run(case, NUM_TEXTS))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_many_more_texts_are_too(case: Case) -> None:
    assert_exact(case, run(case, NUM_TEXTS_SLOW, Sampling(), seed=2))


@pytest.mark.long
@pytest.mark.parametrize("bias", BIASES, ids=by_name)
def test_a_planted_bias_is_rejected(bias: Bias, monkeypatch: pytest.MonkeyPatch) -> None:
    bias.plant(monkeypatch)
    assert run(bias.case, bias.num_texts, bias.models()).p_value < LEVEL


def test_a_second_draft_of_a_node_does_no_harm_because_the_first_one_wins() -> None:
    later = next(bias for bias in BIASES if bias.models is DraftsAgain)
    result = run(later.case, later.num_texts, DraftsAgain())
    assert result.passes
    assert result.num_judged > result.num_texts
