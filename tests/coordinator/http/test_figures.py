"""Figures for Prometheus, and the dashboard that draws them."""

import json
import re
from collections import Counter
from pathlib import Path

from coordinator.api.outputs import CompletionOutput
from coordinator.http.figures import Figures, Nodes
from coordinator.text.metrics import Metrics, PassFigures, SessionCounts
from proto.messages import Role

DASHBOARD = Path(__file__).resolve().parents[3] / "deploy" / "grafana-dashboard.json"


def metrics_of(*passes: tuple[int, int]) -> Metrics:
    """Of passes that accepted so many of so many drafts."""
    counts = SessionCounts()
    for drafted, accepted in passes:
        counts.count(
            PassFigures(
                accepted + 1, accepted, drafted, 0, 0, 0, 1000, 0, 0, "ready", hit="content"
            )
        )
    emitted = [(1.0 + number, accepted + 1) for number, (_, accepted) in enumerate(passes)]
    return Metrics.of(
        counts,
        started=0.5,
        emitted=emitted,
        drafter_lost_at=None,
        queued_s=0.25,
        num_spec_tokens=4,
        num_prompt_tokens=11,
    )


def figures_of(figures: Figures, nodes: Nodes = Nodes([Role.TARGET])) -> dict[str, float]:  # noqa: B008
    """By name and labels."""
    text = figures.text(
        num_running=2,
        num_waiting=3,
        num_lanes=8,
        max_len=512,
        kv_cache_usage=0.25,
        nodes=nodes,
    ).decode()
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            labels = re.sub(r'model_name="m",?', "", name).replace(",}", "}").replace("{}", "")
            found[labels] = float(value)
    return found


def test_an_ended_text_is_counted_under_vllms_names() -> None:
    figures = Figures("m")
    origins = ("draft:model", "draft:model", "bonus")
    figures.came(CompletionOutput(0, "abc", [1, 2, 3], token_origins=origins), 0.0)
    figures.came(
        CompletionOutput(0, "", [], finish_reason="length", metrics=metrics_of((3, 2), (4, 0))), 0.0
    )
    found = figures_of(figures)
    assert found["vllm:spec_decode_num_drafts_total"] == 2
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 7
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 2
    assert found['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}'] == 1
    assert found['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"}'] == 1
    assert found['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2"}'] == 0
    assert found["vllm:generation_tokens_total"] == 3
    assert found["vllm:prompt_tokens_total"] == 11
    assert found["vllm:num_requests_running"] == 2
    assert found["vllm:num_requests_waiting"] == 3
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["slipstream:kv_cache_tokens"] == 8 * 512
    assert found['slipstream:tokens_total{origin="draft:model"}'] == 2
    assert found['slipstream:nodes_ready{role="target"}'] == 1
    assert found['slipstream:nodes_ready{role="drafter"}'] == 0
    assert found["vllm:time_to_first_token_seconds_sum"] == 0.75
    assert found['vllm:request_success_total{finished_reason="length"}'] == 1


def test_lost_and_restarted_nodes_are_counted_and_round_trips_are_of_those_that_are_there() -> None:
    figures = Figures("m")
    drafters = Counter({Role.DRAFTER: 2})
    trips = {"target-1": 0.001, "drafter-1": 0.02}
    figures_of(figures, Nodes([], Counter({Role.DRAFTER: 1}), drafters, trips))
    found = figures_of(figures, Nodes([], drafters, drafters, {"target-1": 0.002}))
    assert found['slipstream:node_restarts_total{role="drafter"}'] == 2
    assert found['slipstream:nodes_lost_total{role="drafter"}'] == 2
    assert found['slipstream:nodes_lost_total{role="target"}'] == 0
    assert found['slipstream:round_trip_seconds{node="target-1"}'] == 0.002
    assert 'slipstream:round_trip_seconds{node="drafter-1"}' not in found


def test_every_figure_of_the_dashboard_is_there() -> None:
    figures = Figures("m")
    figures.came(
        CompletionOutput(
            0, "", [1], finish_reason="stop", metrics=metrics_of((1, 1)), token_origins=("plain",)
        ),
        0.0,
    )
    figures.refused(400)
    nodes = Nodes(round_trips_s={"target": 0.001})
    names = {name.partition("{")[0] for name in figures_of(figures, nodes)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    wanted = Counter(name for query in queries for name in re.findall(r"\w+:\w+", query))
    assert len(wanted) >= 14
    assert set(wanted) <= names
