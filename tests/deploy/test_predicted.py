"""Costs that are read off what was measured: made of known ones, they come back."""

from functools import cache

import pytest

from coordinator.api.config import PairConfig
from deploy.measurements.predicted import (
    CALIBRATED,
    Decoding,
    compare,
    costs_of,
    settings,
    simulated_costs,
    slowed,
)
from rehearsal.acceptance import chances, drawn
from rehearsal.performance import rehearse
from rehearsal.setting import Forwards, NodeCosts

TARGET = NodeCosts(Forwards(((1, 0.030), (2, 0.031), (4, 0.033), (7, 0.036)), 0.001), 0.0002)
DRAFTER = NodeCosts(Forwards(((1, 0.004),)), hop_s=0.003)
LOOP_S = 0.00015  # of the host, between a verdict and the next pass
TRACE = drawn(chances("0.7"), 1, 100)


@cache
def measured() -> dict[str, Decoding]:
    """What would have been measured with these costs."""
    found = {}
    for name, setting in settings().items():
        policy = setting.make(PairConfig())
        figures = rehearse(policy, TARGET, DRAFTER, TRACE, is_whole=True)
        rows = 1 + round(figures.num_drafted / figures.num_passes)
        waits = policy.has_drafter and policy.window == policy.launch_min
        wait_s = LOOP_S + ((2 * 0.003 + policy.launch_min * 0.004) if waits else 0.0)
        found[name] = Decoding(
            figures.tokens_per_second,
            figures.tokens_per_pass,
            TARGET.forward.of(rows),
            wait_s,
            TARGET.host_s - LOOP_S,
        )
    return found


def test_the_costs_of_a_pair_are_found_again_in_what_it_measured() -> None:
    target, drafter = costs_of(measured())
    assert dict(target.forward.known) == pytest.approx(dict(TARGET.forward.known))
    assert target.host_s == pytest.approx(TARGET.host_s)
    assert drafter.forward.of(1) == pytest.approx(0.004)
    assert drafter.hop_s == pytest.approx(0.003)


def test_a_pair_that_is_as_its_costs_say_is_predicted_as_it_is() -> None:
    lines = compare(measured(), TRACE, PairConfig()).splitlines()
    checked = [line for line in lines if line.startswith(("ar", "sync", "pipelined"))]
    assert len(checked) == len(settings())
    for line in checked:
        assert "(+0%)" in line or "(-0%)" in line


def test_a_pass_beside_a_busy_drafter_takes_longer_whatever_its_rows() -> None:
    twice = slowed(TARGET, 2.0).forward
    assert [twice.of(rows) for rows in (1, 4, 9)] == pytest.approx([0.060, 0.066, 0.076])
    assert len(CALIBRATED) + 1 == len(twice.known)


def test_what_the_hosts_take_beside_simulated_devices_is_found_again() -> None:
    config = PairConfig(
        simulate_target_ms=24.0, simulate_draft_ms=3.0, link=("drafter:delay=5ms",), max_num_seqs=1
    )
    costs = (
        NodeCosts(Forwards(((1, 0.024),)), 0.0009),
        NodeCosts(Forwards(((1, 0.003),)), 0.0004, 0.0055),
    )
    found = {}
    names = ("ar", "sync K=1", "sync K=3", "sync K=6")
    for name in names:
        figures = rehearse(settings()[name].make(config), *costs, TRACE, is_whole=True)
        found[name] = Decoding(figures.tokens_per_second, figures.tokens_per_pass, 0.0, 0.0, 0.0)
    target, drafter = simulated_costs(
        config,
        found["ar"],
        {name: (settings()[name], found[name]) for name in names[1:]},
        TRACE,
    )
    assert target.forward.of(9) == 0.024
    assert drafter.forward.of(1) == 0.003
    assert drafter.hop_s == pytest.approx(0.0055, rel=0.02)
    assert target.host_s == pytest.approx(0.0009, rel=0.01)
    assert drafter.host_s == pytest.approx(0.0004, rel=0.05)
