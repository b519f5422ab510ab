"""Puts a recording in order: processes on one clock, messages, texts (pure)."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

from coordinator.tracing.spans import (
    Hop,
    RecordedText,
    Track,
    decoded,
    hops_of,
    pieces_of,
    texts_of,
    track_of,
)
from coordinator.tracing.tape import Recording
from proto.messages import Heartbeat, Hello, TracePart

# -- clocks ----------------------------------------------------------------------------------------

# Estimates the clock of another process from messages to it and back.
#
# The coordinator's heartbeat leaves at t0 of its own clock and comes at t1 of the node's; the
# node's leaves at t2 of that clock and comes at t3. If both ways took the same time, the node's
# clock is ahead by ((t1 - t0) - (t3 - t2)) / 2. In any case the error is at most half of the round
# trip (t3 - t0) - (t2 - t1). So of several exchanges the one with the shortest round trip is the
# most exact (NTP, RFC 5905). Clocks also drift, so there is one such estimate for each ten seconds,
# with linear interpolation between them. All other messages give bounds as well, because a message
# comes after it was sent: those to the node limit how far its clock is ahead at most, and those
# from it, at least.

WINDOW_NS = 10_000_000_000
ROUNDING_NS = 1_000  # time stamps have a resolution of one microsecond


@dataclass(frozen=True, slots=True)
class Exchange:
    """A heartbeat to a node and its answer, with times in nanoseconds of both clocks.

    sent_ns, came_ns   on our clock: when we sent ours, when the answer came
    heard_ns, said_ns  on the node's clock: when our heartbeat came, when its answer was sent
    """

    sent_ns: int
    heard_ns: int
    said_ns: int
    came_ns: int

    @classmethod
    def of(cls, came_ns: int, beat: Heartbeat) -> Self:
        """Return the exchange that a node's heartbeat, which came at `came_ns`, completes."""
        said_ns = beat.clock_us * 1000
        return cls(beat.stamp_us * 1000, said_ns - beat.held_us * 1000, said_ns, came_ns)

    @property
    def round_trip_ns(self) -> int:
        """Return how long request and answer were on their way, in sum."""
        return (self.came_ns - self.sent_ns) - (self.said_ns - self.heard_ns)

    @property
    def ahead_ns(self) -> int:
        """Return how far the node's clock is ahead of ours, estimated from this exchange."""
        return (self.heard_ns - self.sent_ns + self.said_ns - self.came_ns) // 2

    @property
    def error_ns(self) -> int:
        """Return the largest error that `ahead_ns` can have."""
        return self.round_trip_ns // 2 + 2 * ROUNDING_NS


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of another process, relative to ours.

    knots     pairs: a time of that clock, and how far it is ahead of ours then; in the order of
              time, at least one
    error_ns  the largest error of these; 0: it is the same clock as ours
    num_exchanges  heartbeats there and back that the estimate is made from
    """

    knots: tuple[tuple[int, int], ...] = ((0, 0),)
    error_ns: int = 0
    num_exchanges: int = 0

    @property
    def is_same(self) -> bool:
        """True if times of this clock need no correction: it is the coordinator's own clock."""
        return not self.error_ns

    @property
    def ahead_ns(self) -> int:
        """Return how far the clock was ahead of ours at the first estimate."""
        return self.knots[0][1]

    def nearer(self, least_ns: int, most_ns: int) -> "Clock":
        """Return this clock corrected: it is `least_ns` to `most_ns` further ahead.

        The bounds come from messages, none of which can arrive before it was sent. If they are less
        exact than the clock is, or contradict each other, it is returned unchanged. All knots are
        moved alike, so how far they are from each other is part of the error.
        """
        aheads = [ahead_ns for _, ahead_ns in self.knots]
        error_ns = (most_ns - least_ns) // 2 + max(aheads) - min(aheads) + ROUNDING_NS
        if self.is_same or least_ns > most_ns or error_ns >= self.error_ns:
            return self
        shift_ns = (least_ns + most_ns) // 2
        knots = tuple((ns, ahead_ns + shift_ns) for ns, ahead_ns in self.knots)
        return replace(self, knots=knots, error_ns=error_ns)

    def ours(self, theirs_ns: int) -> int:
        """Return a time of that clock as a time of our clock; nanoseconds."""
        after = bisect_right(self.knots, (theirs_ns, 0))
        if after in (0, len(self.knots)):
            return theirs_ns - self.knots[min(after, len(self.knots) - 1)][1]
        (start, low), (end, high) = self.knots[after - 1 : after + 1]
        return theirs_ns - low - (high - low) * (theirs_ns - start) // (end - start)


SAME = Clock()


def clock_of(exchanges: Iterable[Exchange], *, same_host: bool) -> Clock | None:
    """Return the estimated clock of a node, from its exchanges; None: too few to tell.

    same_host  the node says that it runs on our host, where all processes have one clock; this is
               believed unless the exchanges contradict it
    """
    # A negative round trip is impossible, so such a pair of heartbeats is ignored.
    found = sorted((one for one in exchanges if one.round_trip_ns >= 0), key=lambda e: e.said_ns)
    best = [
        min(window, key=lambda e: e.round_trip_ns)
        for _, window in groupby(found, key=lambda e: e.said_ns // WINDOW_NS)
    ]
    if same_host and all(abs(one.ahead_ns) <= one.error_ns for one in best):
        return SAME
    if not best:
        return None
    knots = tuple((one.said_ns, one.ahead_ns) for one in best)
    return Clock(knots, max(one.error_ns for one in best), len(found))


# -- timeline --------------------------------------------------------------------------------------

COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a trace.

    node        the node's id; empty: the coordinator
    role        the node's role, or `coordinator`
    clock       the process's clock; None: unknown, so its track is left out
    num_dropped  records that had no room
    num_missing  parts of its records that never came
    """

    name: str
    node: bytes
    role: str
    model: str
    host: str
    device: str
    clock: Clock | None
    track: Track
    num_dropped: int = 0
    num_missing: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """All processes, messages and texts of a trace, in ns of the coordinator's clock."""

    processes: list[Process]
    hops: list[Hop]
    texts: dict[int, RecordedText]
    num_frames_dropped: int


def timeline_of(recording: Recording, host: str) -> Timeline:
    """Return the timeline of a recording.

    host  the coordinator's host name
    """
    processes = [_coordinator(recording, host)]
    for node, frame in recording.hellos.items():
        if isinstance(hello := decoded(frame), Hello):
            processes.append(_node(node, hello, recording, host))
    hops = _hops(recording, processes)
    aligned = [_aligned(one, hops, recording) for one in processes]
    if aligned != processes:
        processes, hops = aligned, _hops(recording, aligned)
    return Timeline(processes, hops, texts_of(hops), recording.num_frames_dropped)


def _hops(recording: Recording, processes: Sequence[Process]) -> list[Hop]:
    """Return the messages between the coordinator and the nodes in `processes`."""
    notes = {one.node: one.track.notes for one in processes if one.node}
    frames = [one for one in recording.frames if one.ns >= recording.since_ns and one.node in notes]
    slack_ns = max(one.clock.error_ns for one in processes if one.clock is not None)
    return hops_of(frames, notes, slack_ns)


def _aligned(process: Process, hops: Sequence[Hop], recording: Recording) -> Process:
    """Return the process with its clock corrected by the times of its messages."""
    own = [hop for hop in hops if hop.node == process.node]
    ways = [
        (hop.is_to_node, hop.received_ns - hop.sent_ns)
        for hop in own
        if hop.sent_ns is not None and hop.received_ns is not None
    ]
    most_ns = min((way for is_to_node, way in ways if is_to_node), default=None)
    least_ns = max((-way for is_to_node, way in ways if not is_to_node), default=None)
    if process.clock is None or most_ns is None or least_ns is None:
        return process
    clock = process.clock.nearer(least_ns, most_ns)
    if clock == process.clock:
        return process
    pieces, _ = pieces_of(recording.parts.get(process.node, []))
    return replace(process, clock=clock, track=track_of(pieces, recording.since_ns, clock.ours))


def _coordinator(recording: Recording, host: str) -> Process:
    pieces, _ = pieces_of([TracePart(1, 0, recording.own)])
    track = track_of(pieces, recording.since_ns, SAME.ours)
    dropped = recording.num_dropped
    return Process(COORDINATOR, b"", COORDINATOR, "", host, "", SAME, track, dropped)


def _node(node: bytes, hello: Hello, recording: Recording, host: str) -> Process:
    exchanges = [
        Exchange.of(passed.ns, beat)
        for passed in recording.beats.get(node, [])
        if isinstance(beat := decoded(passed.frame), Heartbeat) and beat.stamp_us
    ]
    clock = clock_of(exchanges, same_host=hello.host == host)
    parts = recording.parts.get(node, [])
    pieces, num_missing = pieces_of(parts)
    track = Track()
    if clock is not None:
        track = track_of(pieces, recording.since_ns, clock.ours)
    dropped = parts[-1].num_dropped - parts[0].num_dropped if parts else 0
    dropped += recording.num_records_dropped.get(node, 0)
    return Process(
        name=node.decode(errors="replace"),
        node=node,
        role=hello.role,
        model=hello.model,
        host=hello.host,
        device=hello.device,
        clock=clock,
        track=track,
        num_dropped=dropped,
        num_missing=num_missing,
    )
