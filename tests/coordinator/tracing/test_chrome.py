"""A recording becomes a file that trace viewers open."""

from dataclasses import replace
from typing import Any

import pytest

from coordinator.tracing.chrome import DEVICE_TID, HOST_TID, chrome_trace
from coordinator.tracing.timeline import timeline_of
from proto.messages import TracePart
from proto.stopwatch import Phase
from tests.coordinator.tracing.recordings import (
    DRAFT,
    DRAFTER,
    HOST,
    TARGET,
    VERDICT,
    Script,
    one_round,
    round_on_devices,
)
from tests.coordinator.tracing.schema import faults_of


def trace_of(script: Script) -> dict[str, Any]:
    """What would stand in the file."""
    return chrome_trace(timeline_of(script.finished(), HOST), {"machine": {"host": HOST}})


def named(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The events of this name."""
    return [event for event in trace["traceEvents"] if event["name"] == name]


def test_a_round_becomes_spans_arrows_and_instants() -> None:
    trace = trace_of(one_round())
    assert faults_of(trace) == []
    (step,), (passed,) = named(trace, "draft step"), named(trace, "pass")
    assert (step["dur"], passed["dur"]) == (8000.0, 10000.0)
    assert passed["args"] == {
        "number": 1,
        "rows": 3,
        "asked": 3,
        "texts": [1],
        "drafted": 2,
        "accepted": 1,
        "hit": "hit",
        "cause": "ready",
    }
    assert [event["ph"] for event in named(trace, "accepted draft")] == ["s", "t", "t", "f"]
    assert [event["ph"] for event in named(trace, "verdict")] == ["s", "t", "f"]
    (rejection,), (re_root,) = named(trace, "rejection"), named(trace, "re-root")
    assert (rejection["pid"], re_root["args"]) == (passed["pid"], {"text": 1, "rolled_back": 1})
    (rolled_back,) = named(trace, "roll back")
    assert rolled_back["pid"] == step["pid"]


def test_forwards_on_a_device_have_a_track_beside_their_hosts() -> None:
    trace = trace_of(round_on_devices())
    assert faults_of(trace) == []
    (step,), (passed,) = named(trace, "draft step"), named(trace, "pass")
    assert (step["tid"], step["ts"], step["dur"]) == (DEVICE_TID, 12_000.0, 8_000.0)
    assert (passed["tid"], passed["ts"], passed["dur"]) == (DEVICE_TID, 24_000.0, 10_000.0)
    assert passed["args"]["accepted"] == 1
    beside = [
        (one["tid"], one["ts"], one["dur"])
        for one in named(trace, "decide")
        if one["pid"] == passed["pid"] and 24_000.0 <= one["ts"] < 34_000.0
    ]
    assert beside == [(HOST_TID, 30_000.0, 3_000.0)]
    threads = [one for one in named(trace, "thread_name") if one["args"]["name"] == "device"]
    assert {one["pid"] for one in threads} == {step["pid"], passed["pid"]}
    without = named(trace_of(one_round()), "thread_name")
    assert all(one["args"]["name"] != "device" for one in without)


def test_each_direction_of_a_link_is_a_track() -> None:
    trace = trace_of(one_round())
    wire = [event for event in trace["traceEvents"] if event.get("cat") == "wire"]
    ways = {(one["name"], one["args"]["from"], one["args"]["to"]): one for one in wire}
    assert len(wire) == len(ways) == 6
    assert len({one["tid"] for one in wire}) == 4
    lengths = sorted(one["dur"] for one in wire)
    assert lengths == [900.0, 950.0, 1000.0, 1000.0, 1000.0, 1000.0]


def test_a_message_ends_on_its_track_where_the_next_is_sent_and_says_when_it_was_read() -> None:
    script = Script()
    script.tells(TARGET, DRAFT, 10, 20)
    script.recording.frames[-1] = script.recording.frames[-1]._replace(ns=10_000_000)
    script.tells(TARGET, VERDICT, 19, 21)
    script.phase(TARGET, 30, Phase.WAIT)
    trace = trace_of(script)
    assert faults_of(trace) == []
    wire = [event for event in trace["traceEvents"] if event.get("cat") == "wire"]
    assert len({one["tid"] for one in wire}) == 1
    assert [(one["name"], one["ts"], one["dur"]) for one in wire] == [
        ("Draft", 10_000.0, 9_000.0),
        ("Verdict", 19_000.0, 2_000.0),
    ]
    assert [one["args"]["read_us"] for one in wire] == [20_000.0, 21_000.0]


@pytest.mark.parametrize("ahead_ms", [-0.9, 0.001, 86400e3])
def test_nodes_of_another_host_are_put_on_our_clock(ahead_ms: float) -> None:
    script = one_round(ahead_ms, "elsewhere")
    for node in (TARGET, DRAFTER):
        script.beats(node, way_ms=0.2, back_ms=0.2)
        script.beats(node, way_ms=5.0, back_ms=0.1)
    trace = trace_of(script)
    assert faults_of(trace) == []
    clocks = [one["clock"] for one in trace["otherData"]["processes"]]
    assert [clock["is_same"] for clock in clocks] == [True, False, False]
    assert clocks[1]["ahead_us"] == pytest.approx(ahead_ms * 1e3, abs=1.0)
    assert clocks[1]["error_us"] == pytest.approx(202.0, abs=2.0)
    (passed,) = named(trace, "pass")
    assert passed["ts"] == pytest.approx(24_000.0, abs=2.0)


def test_a_node_whose_clock_is_unknown_is_left_out_and_the_file_says_so() -> None:
    trace = trace_of(one_round(1e6, "elsewhere"))
    assert faults_of(trace) == []
    assert not named(trace, "pass")
    assert trace["otherData"]["processes"][1]["clock"]["unknown"] is True


def test_what_is_missing_is_said() -> None:
    recording = one_round().finished()
    (part,) = recording.parts[TARGET]
    recording.parts[TARGET] = [
        TracePart(1, 0, part.records[:64]),
        TracePart(3, 7, part.records[-64:]),
    ]
    recording.num_frames_dropped = 5
    about = chrome_trace(timeline_of(recording, HOST), {})["otherData"]
    target = about["processes"][1]
    assert (target["num_parts_missing"], target["num_records_dropped"]) == (1, 7)
    assert len(target["recorded"]) == 2
    assert about["num_frames_dropped"] == 5


def test_a_message_that_never_came_is_marked_where_a_later_one_did() -> None:
    script = one_round()
    for number, ms in ((2, 51), (3, 53), (4, 55)):
        script.sends(DRAFTER, replace(DRAFT, number=number), ms, ms + 1)
    del script.recording.frames[-3:-1]  # those that left at 51 and 53 ms
    trace = trace_of(script)
    assert faults_of(trace) == []
    assert [event["ts"] for event in named(trace, "never came: Draft")] == [51_000.0, 53_000.0]
    script = one_round()
    script.sends(DRAFTER, replace(DRAFT, number=2), 51, 52)
    script.recording.frames.pop()
    # It may still be on its way.
    assert not named(trace_of(script), "never came: Draft")


def test_an_empty_recording_is_a_trace_too() -> None:
    trace = chrome_trace(timeline_of(Script().finished(), HOST), {})
    assert faults_of(trace) == []
    assert trace["otherData"]["texts"] == []


def test_frames_of_strangers_and_garbled_ones_do_no_harm() -> None:
    script = one_round()
    stranger = script.recording.frames[2]._replace(node=b"nobody")
    garbled = script.recording.frames[2]._replace(frame=b"\xff")
    script.recording.frames[3:3] = [stranger, garbled]
    script.recording.hellos[b"drafter-2"] = b"\xff"
    script.recording.beats[TARGET] = [garbled]
    trace = trace_of(script)
    assert faults_of(trace) == []
    assert len(named(trace, "draft step")) == len(named(trace, "pass")) == 1
    assert len(trace["otherData"]["processes"]) == 3
