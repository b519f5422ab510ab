"""Whatever is recorded, no span of the file crosses another on its track in floating point."""

import json
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from coordinator.tracing.chrome import chrome_trace
from coordinator.tracing.spans import Hop, track_of
from coordinator.tracing.timeline import COORDINATOR, SAME, Process, Timeline
from coordinator.tracing.writing import write
from lab.trace.reading import parse
from proto.messages import Role
from proto.stopwatch import Mark, Phase, Record
from tests.coordinator.tracing.schema import faults_of

NODES = {b"": COORDINATOR, b"target-1": Role.TARGET.value, b"drafter-1": Role.DRAFTER.value}
MARKS = [*Phase, Mark.FORWARD, Mark.LAUNCHED, Mark.ENDED]
NS = st.one_of(st.integers(0, 400), st.integers(0, 50_000_000))  # from one record to the next
DAY_NS = 86_400_000_000_000  # a clock may have gone on for long when the file begins


@st.composite
def processes(draw: st.DrawFn, node: bytes, role: str) -> Process:
    """A process with any phases, forwards and launches of a device, one after the other."""
    ns = draw(st.integers(0, DAY_NS))
    pieces = []
    for _ in range(draw(st.integers(0, 2))):
        piece, phase = [], -1
        for mark in draw(st.lists(st.sampled_from(MARKS), max_size=20)):
            if mark == phase:
                continue  # only changes of the phase are recorded
            phase = mark if mark in list(Phase) else phase
            ns += draw(NS)
            piece.append(Record(ns, mark, 0, draw(st.integers(0, 2)), draw(st.integers(0, 2))))
        pieces.append(piece)
    track = track_of(pieces, 0, SAME.ours)
    return Process(role, node, role, "", "here", "cpu", SAME, track)


@st.composite
def hops(draw: st.DrawFn) -> Hop:
    """A message that went one way: it was lost, or read at any time after."""
    node = draw(st.sampled_from([b"target-1", b"drafter-1"]))
    sent_ns = draw(st.integers(0, 100_000_000))
    read_ns = draw(st.one_of(st.none(), NS.map(lambda ns: sent_ns + ns)))
    return Hop(0, "Draft", node, draw(st.booleans()), 9, None, sent_ns, read_ns)


TIMELINES = st.builds(
    lambda own, target, drafter, ways: Timeline(
        [own, target, drafter], [replace(one, number=n) for n, one in enumerate(ways)], {}, 0
    ),
    *(processes(node, role) for node, role in NODES.items()),
    st.lists(hops(), max_size=12),
)


@given(TIMELINES)
def test_no_span_crosses_another_on_its_track_in_floating_point(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(chrome_trace(timeline, {})))
    assert faults_of(trace) == []


@given(TIMELINES)
def test_each_direction_has_one_track_and_each_message_its_time(timeline: Timeline) -> None:
    trace = chrome_trace(timeline, {})
    wire = [one for one in trace["traceEvents"] if one.get("cat") == "wire"]
    directions = {(one["args"]["from"], one["args"]["to"]) for one in wire}
    assert len({one["tid"] for one in wire}) == len(directions)
    read = [one for one in wire if one["ph"] == "X"]
    for message in parse(json.dumps(trace), "file.json").messages:
        assert message.received_ns >= message.sent_ns
    came = sorted(hop.received_ns for hop in timeline.hops if hop.received_ns is not None)
    told = sorted(round(one["args"]["read_us"] * 1000) for one in read)
    assert len(told) == len(came)
    for told_ns, ns in zip(told, came, strict=True):
        assert abs((told_ns - told[0]) - (ns - came[0])) <= 125


def test_times_of_a_nanosecond_nest_in_the_file_on_disk(tmp_path: Path) -> None:
    records = [Record(1001 * n, list(Phase)[n % len(Phase)], 0, 0, 0) for n in range(5000)]
    track = track_of([records], 0, SAME.ours)
    own = Process(COORDINATOR, b"", COORDINATOR, "", "here", "", SAME, track)
    write(tmp_path / "trace.json", chrome_trace(Timeline([own], [], {}, 0), {}))
    assert faults_of(json.loads((tmp_path / "trace.json").read_text())) == []
