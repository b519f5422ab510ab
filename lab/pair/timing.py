"""Takes from a recording how long passes, draft steps, hosts and messages take (pure)."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from coordinator.tracing.spans import Forward, Hop, Track
from coordinator.tracing.timeline import Timeline
from proto.messages import Role
from proto.stopwatch import Phase
from rehearsal.setting import Forwards

MOST_ROWS = 17  # more rows are a part of a prompt: no policy that is timed here verifies as many
LEAST_SAMPLES = 3  # with fewer forwards of a number of rows, these do not count
STALL = 4.0  # a forward that takes so many times the median of its rows was interrupted
ON_DEVICE_PHASES = (Phase.MODEL, Phase.CHOOSE, Phase.MOVE)


@dataclass(frozen=True, slots=True)
class Sample:
    """One pass or draft step: its rows, its seconds, and the share that the other model ran."""

    num_rows: int
    seconds: float
    beside: float


@dataclass(frozen=True, slots=True)
class Samples:
    """What one node did in one recording.

    forwards      those of which a policy decided how many rows they have
    num_forwards  all of them, those of prompts included
    host_s        seconds of its host in all, without the model and the choice of tokens
    """

    forwards: tuple[Sample, ...]
    num_forwards: int
    host_s: float


def samples_of(timeline: Timeline, role: Role) -> Samples:
    """Return the forwards of a node, those of prompts left out, and its host's time for each."""
    tracks = {one.role: one.track for one in timeline.processes}
    own, other = tracks.get(role), tracks.get(_other(role))
    if own is None:
        return Samples((), 0, 0.0)
    runs = [] if other is None else [_model_spans(other, one) for one in other.forwards]
    others = sorted(span for spans in runs for span in spans)
    found = []
    for forward in own.forwards:
        is_whole = forward.num_asked == forward.num_rows or role is Role.DRAFTER
        if not forward.num_asked or not is_whole or forward.num_rows > MOST_ROWS:
            continue
        spans = _model_spans(own, forward)
        length = sum(end - start for start, end in spans)
        if length:
            shared = _shared_ns(spans, others) / length
            found.append(Sample(forward.num_rows, length / 1e9, shared))
    return Samples(tuple(found), len(own.forwards), _host_ns(own) / 1e9)


def _other(role: Role) -> Role:
    return Role.TARGET if role is Role.DRAFTER else Role.DRAFTER


def _model_spans(track: Track, forward: Forward) -> list[tuple[int, int]]:
    """Return when a forward's model ran: all of it on a device, else the phases of the model."""
    if forward.on_device:
        return [(forward.start_ns, forward.end_ns)]
    first = bisect_right(track.spans, forward.start_ns, key=lambda span: span.end_ns)
    spans = []
    for span in track.spans[first:]:
        if span.start_ns >= forward.end_ns:
            break
        if span.phase in ON_DEVICE_PHASES:
            spans.append((max(span.start_ns, forward.start_ns), min(span.end_ns, forward.end_ns)))
    return spans


def _shared_ns(spans: Iterable[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """Return the nanoseconds of `spans` in which one of `others` is as well; those are sorted."""
    total = 0
    for start, end in spans:
        first = bisect_right(others, start, key=lambda span: span[1])
        for other_start, other_end in others[first:]:
            if other_start >= end:
                break
            total += min(end, other_end) - max(start, other_start)
    return total


def _host_ns(track: Track) -> int:
    """Return the nanoseconds of a host's work while its model did not run."""
    devices = sorted((one.start_ns, one.end_ns) for one in track.forwards if one.on_device)
    total = 0
    for span in track.spans:
        if span.phase not in ON_DEVICE_PHASES:
            length = span.end_ns - span.start_ns
            total += length - _shared_ns([(span.start_ns, span.end_ns)], devices)
    return total


def ways_of(hops: Sequence[Hop]) -> list[float]:
    """Return the seconds of each draft from the drafter to the target; the coordinator's included.

    A draft that arrives while the target's host computes is read late; so ask for the median of a
    text in which the target waits for its drafts.
    """
    sent: dict[int, int] = {}
    found = []
    for hop in hops:
        if hop.kind == "Draft" and not hop.is_to_node and hop.sent_ns is not None:
            sent[hop.number] = hop.sent_ns
    for hop in hops:
        if hop.is_to_node and hop.number in sent and hop.received_ns is not None:
            found.append(max(0, hop.received_ns - sent[hop.number]) / 1e9)
    return found


def curve(samples: Iterable[Sample], stalled: float) -> Forwards | None:
    """Return the seconds of a forward by its rows, never falling; None: there are too few samples.

    Each number of rows that occurred often enough counts with its median. Medians do not add up to
    the time of a text, so all of them are multiplied by one number, with which they add up to what
    the forwards took. A stall hits whatever runs at that moment. So stalls are left out, and then
    every forward gets its part of the time that was lost. Where more rows were faster than fewer,
    which is chance, both get their weighted mean (pool adjacent violators).

    stalled  share of the model's time that stalls have taken (`share_stalled`)
    """
    usual = {
        rows: [seconds for seconds in each if not _is_stall(seconds, each)]
        for rows, each in sorted(_by_rows(samples).items())
        if len(each) >= LEAST_SAMPLES
    }
    if not usual:
        return None
    medians = {rows: median(each) for rows, each in usual.items()}
    at_median = sum(len(usual[rows]) * seconds for rows, seconds in medians.items())
    stretch = sum(map(sum, usual.values())) / at_median / (1.0 - stalled)
    pools: list[tuple[float, int, list[int]]] = []  # seconds, weight, numbers of rows
    for rows, seconds in medians.items():
        pool = seconds * stretch, len(usual[rows]), [rows]
        while pools and pools[-1][0] > pool[0]:
            before_s, weight, members = pools.pop()
            total = weight + pool[1]
            pool = (before_s * weight + pool[0] * pool[1]) / total, total, members + pool[2]
        pools.append(pool)
    known = tuple((rows, seconds) for seconds, _, members in pools for rows in members)
    (first, first_s), (last, last_s) = known[0], known[-1]
    return Forwards(known, (last_s - first_s) / (last - first) if last > first else 0.0)


def _by_rows(samples: Iterable[Sample]) -> dict[int, list[float]]:
    by_rows: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        by_rows[sample.num_rows].append(sample.seconds)
    return by_rows


def _is_stall(seconds: float, alike: Sequence[float]) -> bool:
    """True if a forward took so much longer than others alike that its machine did other things."""
    return seconds > STALL * median(alike)


def share_stalled(kinds: Iterable[Sequence[Sample]]) -> float:
    """Return the share of all forwards' time by which stalls were longer than forwards alike.

    kinds  groups of forwards in each of which those with as many rows take as long
    """
    alike = [each for samples in kinds for each in _by_rows(samples).values()]
    total_s = sum(map(sum, alike))
    lost_s = sum(
        seconds - median(each) for each in alike for seconds in each if _is_stall(seconds, each)
    )
    return lost_s / total_s if total_s else 0.0


def share_beside(samples: Iterable[Sample]) -> float:
    """Return the share of all forwards' time in which the other model ran; 0: no forwards."""
    known = list(samples)
    total_s = sum(sample.seconds for sample in known)
    return sum(sample.seconds * sample.beside for sample in known) / total_s if known else 0.0
