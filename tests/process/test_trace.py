"""`--trace`: what really happened, in a file that viewers open and `trace-summary` explains."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.launching import launcher
from coordinator.tracing.chrome import DEVICE_TID, HOST_TID
from proto.messages import Role
from tests.coordinator.tracing.schema import faults_of
from tests.process.patience import wait_for
from tests.process.ray_nodes import free_port
from tests.process.reference import generate
from tests.process.test_joining import joined
from tests.tiny_models import make_model

pytestmark = pytest.mark.process

MODULE = (sys.executable, "-m", "coordinator")
ROOT = Path(launcher.ROOT)
TREE = ("--policy", "tree", "--max-tokens", "64", "--ignore-eos")
SLOW = ("--simulate-target-ms", "15")  # so that there is time to draft on a busy machine


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """A command, to its end."""
    return subprocess.run(
        [*MODULE, *options], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )


def traced(path: Path, *options: str) -> dict[str, Any]:
    """The trace of a text of the embedded pair. It keeps to the format."""
    done = run("generate", "def f(x):", *TREE, *SLOW, *options, "--trace", str(path))
    assert done.returncode == 0, done.stderr
    trace: dict[str, Any] = json.loads(path.read_text())
    assert faults_of(trace) == []
    return trace


def summary_of(path: Path, *options: str) -> dict[str, Any]:
    """What is said of a trace. Its shares add up, and nearly all is explained."""
    done = run("trace-summary", str(path), "--json", *options)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    assert summary["explained"] == pytest.approx(1.0, abs=0.02)
    assert sum(summary["shares"].values()) == pytest.approx(1.0, abs=0.02)
    assert summary["shares"]["unexplained"] <= 0.05
    for text in summary["texts"]:
        assert sum(one["ms"] for one in text["rounds"]) == pytest.approx(text["wall_ms"])
        assert sum(one["tokens"] for one in text["rounds"]) == text["num_tokens"]
    return summary


def named(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The events of this name."""
    return [event for event in trace["traceEvents"] if event["name"] == name]


def test_a_tree_is_drafted_while_the_target_verifies_and_rolled_back(tmp_path: Path) -> None:
    path, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    trace = traced(path)
    (text,) = trace["otherData"]["texts"]
    assert (text["policy"], text["num_tokens"]) == ("tree", 64)
    assert sorted(one["args"]["name"] for one in named(trace, "thread_name")) == [
        "coordinator → drafter-1",
        "coordinator → target-1",
        "device",
        "drafter-1 → coordinator",
        *("loop", "loop", "loop"),
        "target-1 → coordinator",
    ]
    steps, passes = named(trace, "draft step"), named(trace, "pass")
    together = [
        (step, one)
        for one in passes
        for step in steps
        if step["ts"] < one["ts"] + one["dur"] and one["ts"] < step["ts"] + step["dur"]
    ]
    assert together, "nothing was drafted while the target verified"
    assert named(trace, "re-root")
    assert named(trace, "roll back")
    assert [event["ph"] for event in named(trace, "accepted draft")].count("f") > 0
    assert sum(one["args"].get("accepted", 0) for one in passes) > 0
    summary = summary_of(path, "--plot", str(picture))
    assert summary["num_tokens"] == 64
    assert 0.0 < summary["overlap"] <= 1.0
    assert summary["shares"]["target"] > 0.2
    # On its device a pass lasts as long as it was told to, from launch to end, and the target hears
    # drafts meanwhile. The drafter's host computes by itself.
    assert {one["tid"] for one in passes} == {DEVICE_TID}
    assert {one["tid"] for one in steps} == {HOST_TID}
    assert min(one["dur"] for one in passes) >= 14_500
    assert 0.0 < summary["beside_ms"]["target"] < summary["shares_ms"]["target"]
    assert summary["beside_ms"]["drafter"] == 0.0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.slow
def test_texts_at_once_over_a_lossy_link_lose_nothing_of_their_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    link = ("--link", "drafter:delay=3ms,jitter=1ms,loss=20%,bandwidth=10Mbit")
    trace = traced(path, *link, "--n", "3", "--temperature", "0.8")
    assert [one["num_parts_missing"] for one in trace["otherData"]["processes"]] == [0, 0, 0]
    assert any(event["name"].startswith("never came: ") for event in trace["traceEvents"])
    summary = summary_of(path)
    assert [text["num_tokens"] for text in summary["texts"]] == [64, 64, 64]
    (of_one,) = summary_of(path, "--text", "2")["texts"]
    assert of_one == summary["texts"][1]


@pytest.mark.long
def test_plain_decoding_waits_for_nobody(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = traced(path, "--policy", "ar")
    assert not named(trace, "draft step")
    summary = summary_of(path)
    assert (summary["num_rounds"], summary["overlap"]) == (64, None)
    assert summary["shares"]["target"] > 0.5


@pytest.mark.long
def test_an_interrupted_text_leaves_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = ("--max-tokens", "1900", "--ignore-eos", *SLOW, "--trace", str(path))
    process = subprocess.Popen(
        [*MODULE, "generate", "def f(x):", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.read(60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert faults_of(json.loads(path.read_text())) == []
    assert 0 < summary_of(path)["num_tokens"] < 1900


@pytest.mark.long
def test_a_full_disk_costs_the_trace_and_not_the_text() -> None:
    done = run("generate", "def f(x):", "--max-tokens", "8", "--seed", "1", "--trace", "/dev/full")
    assert done.returncode == 1
    assert done.stdout.strip()
    assert "error: the trace cannot be written to /dev/full: No space left" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("place", ["missing/trace.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(
    place: str, tmp_path: Path
) -> None:
    started = time.monotonic()
    done = run("generate", "def f(x):", "--trace", str(tmp_path / place))
    assert done.returncode == 2
    assert done.stderr.startswith("error: --trace: ")
    assert len(done.stderr.splitlines()) == 1
    assert time.monotonic() - started < 60


@pytest.mark.long
@pytest.mark.slow
def test_a_drafter_that_was_started_again_has_a_track_of_its_own(tmp_path: Path) -> None:
    folder = str(make_model("llama", tmp_path / "llama"))
    config = PairConfig(
        target=folder, drafter=folder, dtype="float32", simulate_target_ms=5.0, drafter_restarts=2
    )
    sync, greedy = SpeculationConfig(policy="sync"), SamplingParams(max_tokens=40, ignore_eos=True)
    with Pair(config, traced=True) as pair:
        generate(pair, (5, 6, 7), sync, greedy)
        pair.service.wait_for_traces()  # what a process did last dies with it
        os.kill(pair.pids()["drafter"], signal.SIGKILL)
        registry = pair.service.registry
        assert wait_for(lambda: not registry.ready(Role.DRAFTER), 10.0)
        assert wait_for(lambda: registry.ready(Role.DRAFTER), 60.0)
        generate(pair, (5, 6, 7), sync, greedy)
        pair.write_trace(tmp_path / "both.json")
        generate(pair, (5, 6, 7), sync, greedy)
        pair.write_trace(tmp_path / "last.json")
    both = json.loads((tmp_path / "both.json").read_text())
    assert faults_of(both) == []
    pids = {event["pid"] for event in named(both, "draft step")}
    names = {one["pid"]: one["name"] for one in both["otherData"]["processes"]}
    assert [names[pid].startswith("drafter-1") for pid in pids] == [True, True]
    assert [one["num_tokens"] for one in summary_of(tmp_path / "both.json")["texts"]] == [40, 40]
    # What was written once is not written again, and what follows is whole.
    assert [one["num_tokens"] for one in summary_of(tmp_path / "last.json")["texts"]] == [40]
    assert faults_of(json.loads((tmp_path / "last.json").read_text())) == []


@pytest.mark.long
def test_nodes_of_another_host_are_aligned_within_the_error_that_is_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here all hosts have one clock, so what is estimated should be nothing."""
    folder = str(make_model("llama", tmp_path / "llama"))
    config = PairConfig(target=folder, drafter=folder, dtype="float32", simulate_target_ms=5.0)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    path = tmp_path / "trace.json"
    with Pair(config, traced=True) as pair:
        sync, greedy = SpeculationConfig(policy="sync"), SamplingParams(max_tokens=40)
        generate(pair, (5, 6, 7), sync, greedy)
        pair.write_trace(path)
    trace = json.loads(path.read_text())
    assert faults_of(trace) == []
    _, *nodes = trace["otherData"]["processes"]
    assert len(nodes) == 2
    for node in nodes:
        clock = node["clock"]
        assert not clock["is_same"]
        assert clock["num_exchanges"] > 0
        assert abs(clock["ahead_us"]) <= clock["error_us"] < 100e3
    summary_of(path)


@pytest.mark.long
@pytest.mark.slow
def test_nodes_that_were_started_by_hand_are_traced_as_others(tmp_path: Path) -> None:
    model, keys = str(make_model("llama", tmp_path / "llama")), str(tmp_path / "keys")
    assert run("keys", "new", keys).returncode == 0
    endpoint, path = f"tcp://127.0.0.1:{free_port()}", tmp_path / "trace.json"
    options = ("--target", model, "--drafter", model, "--policy", "sync", "--max-tokens", "40")
    remote = ("--nodes", "remote", "--listen", endpoint, "--keys", keys)
    with (
        joined("target_node", tmp_path / "t", endpoint, model, "--keys", keys),
        joined("drafter_node", tmp_path / "d", endpoint, model, "--keys", keys),
    ):
        for _ in range(2):  # the second coordinator wants one as well
            done = run(
                *("generate", "--prompt-ids", "5,6,7", "--ignore-eos", *options, *remote),
                *("--trace", str(path)),
            )
            assert done.returncode == 0, done.stderr
            assert faults_of(json.loads(path.read_text())) == []
            assert summary_of(path)["num_tokens"] == 40
