"""A recording, put in order: every process on one clock, every message, every text (pure)."""

from dataclasses import dataclass

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
    notes = {one.node: one.track.notes for one in processes if one.node}
    frames = [one for one in recording.frames if one.ns >= recording.since_ns and one.node in notes]
    hops = hops_of(frames, notes)
    return Timeline(processes, hops, texts_of(hops), recording.num_frames_dropped)


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
