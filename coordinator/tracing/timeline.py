"""A recording, put in order: every process on one clock, every message, every text (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.tracing.clocks import SAME, Clock, Exchange, clock_of
from coordinator.tracing.hops import Hop, decoded, hops_of
from coordinator.tracing.tape import Recording
from coordinator.tracing.texts import Text, texts_of
from coordinator.tracing.tracks import Track, pieces_of, track_of
from proto.messages import Heartbeat, Hello, TracePart

COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a trace.

    node        its id; empty: the coordinator
    role        of a node, or `coordinator`
    clock       None: nothing is known of it, so what it did is left out
    num_dropped  records that there was no room for
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
    """What happened, in nanoseconds of the coordinator's clock."""

    processes: list[Process]
    hops: list[Hop]
    texts: dict[int, Text]
    num_frames_dropped: int


def timeline_of(recording: Recording, host: str) -> Timeline:
    """Put a recording in order.

    host  of the coordinator
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
    """The messages between processes that are known."""
    notes = {one.node: one.track.notes for one in processes if one.node}
    frames = [one for one in recording.frames if one.ns >= recording.since_ns and one.node in notes]
    slack_ns = max(one.clock.error_ns for one in processes if one.clock is not None)
    return hops_of(frames, notes, slack_ns)


def _aligned(process: Process, hops: Sequence[Hop], recording: Recording) -> Process:
    """A process with the clock that its messages tell, if they tell more than its heartbeats."""
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
