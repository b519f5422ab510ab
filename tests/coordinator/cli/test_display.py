"""What a person sees around the text."""

from dataclasses import MISSING, fields, replace
from typing import Any

from coordinator.api.config import PairConfig
from coordinator.cli.writers import WIDTH, engines, figures_of_all, simulation, summary
from coordinator.cluster.registry import Node
from coordinator.text.metrics import Metrics, SessionCounts, Simulated
from proto.liveness import FaultDetector
from proto.messages import Hello, Role

LINK = "drafter:delay=5ms,jitter=1ms,loss=1%"
DEVICES = Simulated(30.0, 0.1, 2.0, 0.0, (LINK,), 0, 1000, 10, late_ms=9.0, elapsed_ms=2000.0)


def figures(simulated: Simulated | None) -> Metrics:
    """Of a text of four tokens."""
    metrics = Metrics.of(
        SessionCounts(),
        started=0.0,
        emitted=[(0.1, 1), (0.2, 3)],
        drafter_lost_at=None,
        queued_s=0.0,
        num_spec_tokens=0,
    )
    return replace(metrics, simulated=simulated)


def test_figures_of_other_hardware_are_marked_as_such_and_those_of_this_one_are_not() -> None:
    for shown in (
        summary(figures(DEVICES), policy="ar", seed=None),
        figures_of_all([figures(DEVICES), figures(DEVICES)], policy="ar"),
    ):
        marked = shown[shown.index("SIMULATED") :]
        assert " ".join(marked.split()) == (
            "SIMULATED: a target pass 30 ms + 0.1 ms a row; a draft step 2 ms; link "
            "drafter:delay=5ms,jitter=1ms,loss=1%; 10 of 1000 forwards took longer than simulated, "
            "by 0.4% of the time"
        )
        assert max(map(len, marked.splitlines())) <= WIDTH
    assert "SIMULATED" not in summary(figures(None), policy="ar", seed=None)
    assert "SIMULATED" not in figures_of_all([figures(None)] * 2, policy="ar")


def test_figures_are_void_where_much_was_late_and_told_with_what_a_little_takes() -> None:
    late = Simulated(30.0, 0.0, 0.0, 0.0, (), 0, 1000, 11, late_ms=29.0, elapsed_ms=2000.0)
    words = " ".join(simulation(late).split())
    assert words.endswith(
        "11 of 1000 forwards took longer than simulated, by 1.5% of the time: "
        "speeds may be too low by as much"
    )
    assert not DEVICES.is_void
    assert not late.is_void
    starved = replace(late, num_overruns=40, late_ms=140.0)
    assert starved.is_void
    assert " ".join(simulation(starved).split()).endswith(
        "40 of 1000 forwards took longer than simulated, by 7.0% of the time: the figures are void"
    )
    assert not starved.since(starved, 10.0).is_void
    assert starved.since(DEVICES, 1900.0).is_void
    assert not starved.since(DEVICES, 3000.0).is_void


def test_the_forwards_that_ran_are_told_of_the_nodes_that_are_there() -> None:
    said: dict[str, Any] = {field.name: 0 for field in fields(Hello) if field.default is MISSING}
    said |= {"role": Role.TARGET, "dtype": "bfloat16", "device": "cuda:0", "backend": "graphs"}
    hello = Hello(**said)
    there = Node(Role.TARGET, b"target-1", FaultDetector(0.0), hello=hello)
    expected = Node(Role.DRAFTER, b"drafter-1", FaultDetector(0.0))
    assert engines([there, expected]) == "target: graphs, bfloat16, cuda:0"


def test_a_pair_knows_what_of_it_is_simulated() -> None:
    assert PairConfig().simulated is None
    link = PairConfig(link=("target:loss=1%",)).simulated
    assert link is not None
    assert simulation(link) == "SIMULATED: link target:loss=1%"
    rows = PairConfig(simulate_draft_ms_per_row=0.5).simulated
    assert rows is not None
    assert rows.words == "a draft step 0.5 ms a row"


def test_a_target_with_heads_of_its_own_says_of_which_kind() -> None:
    said: dict[str, Any] = {field.name: 0 for field in fields(Hello) if field.default is MISSING}
    said |= {"role": Role.TARGET, "dtype": "float32", "device": "cpu:0", "backend": "fused"}
    target = Node(Role.TARGET, b"t", FaultDetector(0.0), hello=Hello(**said, heads="medusa"))
    said |= {"role": Role.DRAFTER, "device": "cpu:1", "backend": "eagle"}
    drafter = Node(Role.DRAFTER, b"d", FaultDetector(0.0), hello=Hello(**said, layers=(-1,)))
    assert engines([target, drafter]) == (
        "target: fused, float32, cpu:0, medusa heads; drafter: eagle, float32, cpu:1"
    )
