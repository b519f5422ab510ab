"""What a person sees around the text."""

from dataclasses import MISSING, fields, replace
from types import SimpleNamespace
from typing import Any

from coordinator.api.config import PairConfig
from coordinator.cli.writers import WIDTH, engines, figures_of_all, ran_on, simulation, summary
from coordinator.cluster.node import Node
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
    target = Node(
        Role.TARGET, b"t", FaultDetector(0.0), hello=Hello(**said, home_drafter="medusa heads")
    )
    said |= {"role": Role.DRAFTER, "device": "cpu:1", "backend": "eagle"}
    drafter = Node(Role.DRAFTER, b"d", FaultDetector(0.0), hello=Hello(**said, layers=(-1,)))
    assert engines([target, drafter]) == (
        "target: fused, float32, cpu:0, medusa heads; drafter: eagle, float32, cpu:1"
    )


def written(**of: Any) -> Metrics:
    """The figures of a text of 40 tokens and 21 passes in a second, with other figures."""
    usual = {
        "num_tokens": 41,
        "num_target_passes": 21,
        "num_draft_tokens": 60,
        "writing_s": 1.0,
        "writing_tokens_per_second": 40.0,
        "speedup": 1.5,
        "elapsed_s": 1.1,
    }
    return replace(figures(None), **usual | of)


def test_drafts_that_pay_on_a_quiet_machine_leave_no_doubt() -> None:
    assert len(summary(written(), policy="auto", seed=None).splitlines()) == 2


def test_drafts_that_did_not_pay_are_told_with_what_they_cost() -> None:
    shown = summary(written(speedup=0.8), policy="tree", seed=None).splitlines()
    assert shown[0].startswith("41 tokens, 40.0 tokens/s, 0.8 x plain")
    assert shown[2:] == ["drafts did not pay: 2.0 tokens took 50.0 ms, alone 40.0 ms (--policy ar)"]
    assert max(map(len, shown)) <= WIDTH
    assert len(summary(written(speedup=0.96), policy="tree", seed=None).splitlines()) == 2
    few = written(speedup=0.8, num_target_passes=7)
    assert len(summary(few, policy="tree", seed=None).splitlines()) == 2


def test_a_drafter_that_rested_is_told_of() -> None:
    rested = written(fallbacks={"resting": 12}, speedup=0.9)
    assert summary(rested, policy="auto", seed=None).splitlines()[2:] == [
        "the drafter rested in 12 of 21 passes: the target alone is about as fast"
    ]


def test_a_ratio_that_was_measured_beside_other_programs_says_so() -> None:
    shown = summary(written(), policy="auto", seed=None, others=0.8).splitlines()
    assert shown[2:] == [
        "other programs used 0.8 cores meanwhile: on a quiet machine x plain differs"
    ]
    plain = written(num_draft_tokens=0)
    assert len(summary(plain, policy="ar", seed=None, others=0.8).splitlines()) == 2


def test_what_x_plain_compares_with_is_named() -> None:
    said: dict[str, Any] = {field.name: 0 for field in fields(Hello) if field.default is MISSING}
    said |= {"role": Role.TARGET, "dtype": "float32", "device": "cpu:0", "backend": "fused"}
    hello = Hello(**said)
    nodes = [Node(Role.TARGET, b"t", FaultDetector(0.0), hello=hello)]
    service = SimpleNamespace(registry=SimpleNamespace(nodes=nodes), alone_on="cpu:0-1")
    pair: Any = SimpleNamespace(service=service, hello=lambda _: hello)
    assert ran_on(pair) == [
        "target: fused, float32, cpu:0",
        "plain: the target alone, float32, on the faster of cpu:0 and cpu:0-1",
    ]
    service.alone_on = ""
    assert ran_on(pair)[1] == "plain: the target alone, float32, on cpu:0"
    assert ran_on(pair, compares=False) == ["target: fused, float32, cpu:0"]
