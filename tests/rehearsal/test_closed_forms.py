"""The formulas against the machines in virtual time."""

from dataclasses import replace

import pytest

from proto.messages import Policy
from proto.policies import POLICIES, without_prices
from rehearsal.acceptance import chances, drawn
from rehearsal.planning import Figures, rehearse, step_s
from rehearsal.setting import Forwards, NodeCosts
from tests.theory.closed_forms import free_running_chain, synchronous, tokens_per_pass

STEP_S = 1e-3


def rehearsed(policy: Policy, alpha: float, pass_: float, hop: float, num_tokens: int) -> Figures:
    """Where rows are free and the host takes no time, as in the formulas."""
    target = NodeCosts(Forwards(((1, pass_ * STEP_S),)))
    drafter = NodeCosts(Forwards(((1, STEP_S),)), hop_s=hop * STEP_S)
    return rehearse(policy, target, drafter, drawn(chances(str(alpha)), 1, num_tokens))


@pytest.mark.parametrize(("alpha", "k", "hop"), [(0.6, 2, 0.1), (0.8, 4, 1.0), (0.8, 6, 0.5)])
def test_the_machines_take_as_long_as_the_formula_says_under_sync(
    alpha: float, k: int, hop: float
) -> None:
    figures = rehearsed(POLICIES["sync"].make(k, k), alpha, 8.0, hop, 700)
    assert figures.tokens_per_pass == pytest.approx(tokens_per_pass(alpha, k), rel=0.02)
    token = 1.0 / STEP_S / figures.tokens_per_second
    assert token == pytest.approx(synchronous(alpha, k, 8.0, hop), rel=0.02)


@pytest.mark.parametrize(
    ("alpha", "pass_", "hop"), [(0.6, 12.0, 0.5), (0.8, 8.0, 0.1), (0.8, 6.0, 1.0)]
)
def test_a_chain_that_never_waits_takes_about_as_long_as_the_formula_says(
    alpha: float, pass_: float, hop: float
) -> None:
    policy = POLICIES["pipelined"].make(32, 40)
    assert policy.launch_min == 2
    policy = replace(without_prices(policy), group=1, min_score=-1e9)
    token = 1.0 / STEP_S / rehearsed(policy, alpha, pass_, hop, 300).tokens_per_second
    assert token == pytest.approx(free_running_chain(alpha, 2, pass_, hop), rel=0.1)


def test_a_forward_takes_what_the_slower_of_memory_and_arithmetic_takes() -> None:
    assert step_s(num_bytes=4e9, bandwidth=2e9, flops=3e9, peak=1e9) == 3.0
    assert step_s(num_bytes=4e9, bandwidth=1e9, flops=3e9, peak=1e9) == 4.0
