"""What all events of a Chrome trace are made with: their times, process ids and forms (pure)."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.tracing.hops import Hop
from coordinator.tracing.timeline import Process, Timeline
from proto.messages import Verdict

Event = dict[str, Any]

COORDINATOR_PID, LINKS_PID = 1, 1000


def round_us(ns: int) -> float:
    """Nanoseconds in microseconds, exactly."""
    return round(ns / 1000, 3)


@dataclass(frozen=True, slots=True)
class Scale:
    """From what was recorded to what stands in the file.

    start_ns  the file's zero
    pids      of the processes, by node
    texts     their numbers from 1, by session
    """

    start_ns: int
    pids: Mapping[bytes, int]
    texts: Mapping[int, int]

    @classmethod
    def of(cls, timeline: Timeline) -> "Scale":
        """The scale of a timeline: it begins with the first thing that is known."""
        times = [one.track.recorded[0][0] for one in timeline.processes if one.track.recorded]
        times += [ns for hop in timeline.hops for ns in (hop.sent_ns, hop.received_ns) if ns]
        pids = {one.node: COORDINATOR_PID + n for n, one in enumerate(timeline.processes)}
        texts = {session: n for n, session in enumerate(timeline.texts, 1)}
        return cls(min(times, default=0), pids, texts)

    def us(self, ns: int) -> float:
        """A time in the file."""
        return round_us(ns - self.start_ns)

    def span(
        self,
        pid: int,
        tid: int,
        name: str,
        category: str,
        start_ns: int,
        end_ns: int,
        args: Mapping[str, Any] | None = None,
    ) -> Event:
        """Something that lasts."""
        event: Event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category}
        event |= {"ts": self.us(start_ns), "dur": round_us(end_ns - start_ns)}
        return event if args is None else event | {"args": args}

    def instant(
        self, pid: int, tid: int, name: str, category: str, ns: int, args: Mapping[str, Any]
    ) -> Event:
        """Something that happens."""
        event: Event = {"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name}
        return event | {"cat": category, "ts": self.us(ns), "args": args}

    def flow(self, phase: str, pid: int, name: str, number: int, ns: int) -> Event:
        """A point of an arrow, in the span of this process that is around it."""
        event: Event = {"ph": phase, "id": number, "pid": pid, "tid": 1, "name": name}
        event |= {"cat": "flow", "ts": self.us(ns)}
        return event | {"bp": "e"} if phase == "f" else event


def of_verdicts(hops: Sequence[Hop], process: Process) -> dict[int, list[Hop]]:
    """The verdicts of each pass of a target, by when the pass ended."""
    ends = [forward.end_ns for forward in process.track.forwards]
    found: dict[int, list[Hop]] = {}
    for hop in hops:
        is_own = hop.node == process.node and not hop.is_to_node
        if is_own and isinstance(hop.message, Verdict) and hop.sent_ns is not None:
            after = bisect_right(ends, hop.sent_ns)
            if after:
                found.setdefault(ends[after - 1], []).append(hop)
    return found
