"""What the Trace Event Format asks of a file, and a viewer besides: each check names what is wrong.

The format: "Trace Event Format", by the authors of chrome://tracing; Perfetto reads the same.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

REQUIRED: dict[str, dict[str, tuple[type, ...]]] = {
    "X": {"cat": (str,), "dur": (int, float)},
    "i": {"cat": (str,), "s": (str,), "args": (dict,)},
    "s": {"cat": (str,), "id": (int,)},
    "t": {"cat": (str,), "id": (int,)},
    "f": {"cat": (str,), "id": (int,), "bp": (str,)},
    "M": {"args": (dict,)},
}
OF_ALL: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "pid": (int,),
    "tid": (int,),
    "ts": (int, float),
}

Event = dict[str, Any]


def faults_of(trace: dict[str, Any]) -> list[str]:
    """All that is wrong with a trace."""
    events = trace["traceEvents"]
    assert isinstance(events, list)
    found = [fault for event in events for fault in _faults_of_event(event)]
    if not found:
        found += [*_unordered(events), *_crossing(events), *_confused(events)]
        found += [*_loose(events), *_nameless(events)]
    return found


def _faults_of_event(event: Event) -> Iterator[str]:
    if event.get("ph") not in REQUIRED:
        yield f"an event of no known phase: {event}"
        return
    for name, types in (OF_ALL | REQUIRED[event["ph"]]).items():
        if not isinstance(event.get(name), types) or isinstance(event.get(name), bool):
            yield f"{name} is missing or of another type: {event}"
            return
    if event["ts"] < 0 or event.get("dur", 0) < 0:
        yield f"a negative time: {event}"
    if event["ph"] == "i" and event["s"] not in ("t", "p", "g"):
        yield f"an instant of no known scope: {event}"


def _unordered(events: list[Event]) -> Iterator[str]:
    times = [event["ts"] for event in events if event["ph"] != "M"]
    if any(a > b for a, b in pairwise(times)):
        yield "the events are not in the order of time"


def spans_of(events: list[Event]) -> dict[tuple[int, int], list[tuple[float, float, str]]]:
    """By track: `ts` and `ts + dur` as a viewer adds them in floating point, and the name; of those
    that start together the longest first."""
    spans: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            end = float(event["ts"]) + float(event["dur"])
            spans[event["pid"], event["tid"]].append((event["ts"], end, event["name"]))
    for of_track in spans.values():
        of_track.sort(key=lambda span: (span[0], -span[1]))
    return spans


def _crossing(events: list[Event]) -> Iterator[str]:
    """Two spans of a track lie in each other or beside each other, as a viewer adds their times."""
    for track, spans in spans_of(events).items():
        around: list[tuple[float, float, str]] = []
        for span in spans:
            while around and around[-1][1] <= span[0]:
                around.pop()
            if around and span[1] > around[-1][1]:
                yield f"on track {track} {span} crosses {around[-1]}"
            around.append(span)


def _confused(events: list[Event]) -> Iterator[str]:
    """No span begins where an equal one ends: speedscope would put the second into the first."""
    ends: dict[tuple[int, int, str], float] = {}
    for event in events:
        if event["ph"] == "X":
            looks = event["pid"], event["tid"], f"{event['name']} {event.get('args')}"
            if ends.get(looks) == event["ts"]:
                yield f"an equal span ends where this one begins: {event}"
            ends[looks] = event["ts"] + event["dur"]


def _loose(events: list[Event]) -> Iterator[str]:
    """Every arrow has one start and one end, in this order, each point in a span."""
    points: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            points[event["id"]].append(event)
    spans = spans_of(events)
    for number, found in points.items():
        phases = "".join(event["ph"] for event in found)
        if phases != "s" + "t" * (len(phases) - 2) + "f":
            yield f"arrow {number} goes {phases}"
        for event in found:
            on_track = spans[event["pid"], event["tid"]]
            if not any(start <= event["ts"] <= end for start, end, _ in on_track):
                yield f"a point of arrow {number} lies in no span: {event}"


def _nameless(events: list[Event]) -> Iterator[str]:
    """Every track has a name, and so has its process."""
    named: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for event in events:
        if event["ph"] == "M":
            named[event["name"]].add((event["pid"], event["tid"]))
    for event in events:
        pid, tid = event["pid"], event["tid"]
        if (pid, 0) not in named["process_name"]:
            yield f"process {pid} has no name"
        if event["ph"] != "M" and (pid, tid) not in named["thread_name"]:
            yield f"track {pid}, {tid} has no name"
