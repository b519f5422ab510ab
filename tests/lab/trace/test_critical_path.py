"""What a text spent its time on, of rounds that are made by hand."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.tracing.chrome import chrome_trace
from coordinator.tracing.tape import Recording
from coordinator.tracing.timeline import timeline_of
from lab.trace.critical_path import SHARES, Path, overlap, paths_of
from lab.trace.reading import Busy, Process, Trace, parse
from proto.messages import TRACE_RECORD_BYTES, TracePart
from proto.stopwatch import Phase
from tests.coordinator.tracing.recordings import (
    DRAFTER,
    HOST,
    OPEN,
    TARGET,
    VERDICT,
    Script,
    one_round,
    round_on_devices,
)
from tests.coordinator.tracing.schema import faults_of


def trace_of(recording: Recording) -> Trace:
    """The trace, written and read back."""
    return parse(json.dumps(chrome_trace(timeline_of(recording, HOST), {})), "a file")


def path_of(recording: Recording) -> Path:
    """The path of its only text."""
    (path,) = paths_of(trace_of(recording))
    return path


def ms_of(path: Path) -> dict[str, float]:
    """The shares that are not nothing, in milliseconds."""
    return {name: round(ns / 1e6, 3) for name, ns in path.shares_ns.items() if ns}


def test_every_moment_of_a_round_goes_to_whoever_was_waited_for() -> None:
    path = path_of(one_round().finished())
    assert ms_of(path) == {
        "target": 9.9,  # 24.1 to 34
        "drafter": 7.9,  # 12.1 to 20, while the target waits for the draft
        "wire": 3.93,  # the Open from when both have theirs, the draft twice, the verdict
        "host": 3.72,
        "waiting": 0.55,  # until the drafter has its Open, and until it begins
    }
    assert (path.end_ns - path.start_ns) / 1e6 == 26.0
    (only,) = path.rounds
    assert (only.tokens, only.drafted, only.accepted, only.rolled_back) == (2, 2, 1, 1)


def test_host_work_beside_a_device_is_no_share_of_its_own() -> None:
    recording = round_on_devices().finished()
    path = path_of(recording)
    assert ms_of(path) == {
        "target": 10.0,  # 24 to 34, whatever the host did
        "drafter": 8.0,  # 12 to 20
        "wire": 3.93,
        "host": 2.14,
        "waiting": 1.93,  # 34 to 34.99 as well, since the target does nothing then
    }
    assert sum(path.shares_ns.values()) == path.end_ns - path.start_ns == 26_000_000
    (only,) = path.rounds
    assert only.beside_ns == {"target": 3_000_000, "drafter": 2_000_000}
    (without,) = path_of(one_round().finished()).rounds
    assert without.beside_ns == {"target": 0, "drafter": 0}
    assert overlap(trace_of(recording)) == 0.0


def test_an_other_host_makes_no_difference() -> None:
    script = one_round(5000.0, "elsewhere")
    for node in (TARGET, DRAFTER):
        script.beats(node, way_ms=0.0, back_ms=0.0)
    here = ms_of(path_of(one_round().finished()))
    assert ms_of(path_of(script.finished())) == pytest.approx(here, abs=0.01)


@pytest.mark.parametrize(("way_ms", "back_ms"), [(6.0, 0.0), (0.0, 6.0)])
def test_messages_mend_what_heartbeats_say_of_a_clock(way_ms: float, back_ms: float) -> None:
    """By those alone, wrong by three milliseconds, some would come before they are sent."""
    script = one_round(5000.0, "elsewhere")
    for node in (TARGET, DRAFTER):
        script.beats(node, way_ms, back_ms)
    recording = script.finished()
    assert faults_of(chrome_trace(timeline_of(recording, HOST), {})) == []
    path = path_of(recording)
    assert ms_of(path) == pytest.approx(ms_of(path_of(one_round().finished())), abs=0.1)


def test_where_nothing_comes_the_target_waits_for_its_deadline() -> None:
    script = Script()
    script.tells(TARGET, OPEN, 10, 11)
    script.phase(TARGET, 11.5, Phase.WAIT)
    script.forward(TARGET, 14.5, 20)
    script.sends(TARGET, VERDICT, 20.5, 21)
    script.phase(TARGET, 30, Phase.WAIT)
    assert ms_of(path_of(script.finished())) == {
        "target": 5.4,
        "wire": 1.49,
        "host": 1.11,
        "waiting": 3.0,  # from 11.5 to 14.5
    }


def test_what_is_not_recorded_is_unexplained() -> None:
    recording = one_round().finished()
    recording.parts[DRAFTER] = []
    without_drafter = ms_of(path_of(recording))
    assert without_drafter["unexplained"] == pytest.approx(11.99, abs=1.0)
    assert without_drafter["target"] == 9.9
    recording = one_round().finished()
    recording.parts[TARGET] = []
    assert paths_of(trace_of(recording)) == []


@given(st.data())
def test_the_shares_add_up_whatever_is_missing(data: st.DataObject) -> None:
    """A verdict that the target did not say it sent ends no round."""
    recording = one_round().finished()
    for node in (TARGET, DRAFTER):
        (part,) = recording.parts[node]
        total = len(part.records) // TRACE_RECORD_BYTES
        cuts = sorted(data.draw(st.sets(st.integers(0, total), min_size=2, max_size=6)))
        spans = [
            part.records[start * TRACE_RECORD_BYTES : end * TRACE_RECORD_BYTES]
            for start, end in pairwise(cuts)
        ]
        numbers = data.draw(st.sets(st.integers(1, 9), min_size=len(spans), max_size=len(spans)))
        recording.parts[node] = [
            TracePart(number, 0, records)
            for number, records in zip(sorted(numbers), spans, strict=True)
        ]
    for path in paths_of(trace_of(recording)):
        assert sum(path.shares_ns.values()) == path.end_ns - path.start_ns
        assert all(path.shares_ns[name] >= 0 for name in SHARES)


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=8)


@given(SPANS, SPANS)
def test_overlap_is_counted_moment_by_moment(
    target: list[tuple[int, int]], drafter: list[tuple[int, int]]
) -> None:
    processes = {
        pid: Process(pid, role, role, [], {}, _apart(spans))
        for pid, role, spans in ((2, "target", target), (3, "drafter", drafter))
    }
    moments = {
        pid: {at for one in process.busy for at in range(one.start_ns, one.end_ns)}
        for pid, process in processes.items()
    }
    found = overlap(Trace(processes, [], [], {}))
    if not target or not drafter:
        assert found is None
    else:
        assert found == len(moments[2] & moments[3]) / len(moments[2])


def _apart(spans: list[tuple[int, int]]) -> list[Busy]:
    """Spans of these lengths, each moved behind the one before."""
    found: list[Busy] = []
    for start, length in sorted(spans):
        at = max(start, found[-1].end_ns if found else 0)
        found.append(Busy(at, at + length, "model", "model"))
    return found
