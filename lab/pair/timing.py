"""Takes from a recording how long passes, draft steps, hosts and messages take (pure).

A forward counts as *beside* if the other model ran during at least half of it, and as *alone* if
that ran during at most a tenth. Two models that run at once share caches, memory and sometimes
cores, so both kinds are told apart.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from coordinator.tracing.spans import Forward, Hop, Track
from coordinator.tracing.timeline import Timeline
from proto.messages import Role
from proto.stopwatch import Phase
from rehearsal.setting import Forwards

MOST_ROWS = 17  # more rows are a part of a prompt: no policy that is timed here verifies as many
BESIDE, ALONE = 0.5, 0.1
LEAST_SAMPLES = 3  # with fewer forwards of a number of rows, these do not count
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


def curve(samples: Iterable[Sample]) -> Forwards | None:
    """Return the seconds of a forward by its rows, never falling; None: there are too few samples.

    Each number of rows that occurred often enough counts with its mean: means add up to the time of
    a text, medians do not. Where more rows were faster than fewer, which is chance, both get their
    weighted mean (pool adjacent violators).
    """
    by_rows: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        by_rows[sample.num_rows].append(sample.seconds)
    pools: list[tuple[float, int, list[int]]] = []  # seconds, weight, numbers of rows
    for rows in sorted(by_rows):
        times = by_rows[rows]
        if len(times) < LEAST_SAMPLES:
            continue
        pool = fmean(times), len(times), [rows]
        while pools and pools[-1][0] > pool[0]:
            seconds, weight, members = pools.pop()
            total = weight + pool[1]
            mean = (seconds * weight + pool[0] * pool[1]) / total
            pool = mean, total, members + pool[2]
        pools.append(pool)
    known = tuple((rows, seconds) for seconds, _, members in pools for rows in members)
    if not known:
        return None
    (first, first_s), (last, last_s) = known[0], known[-1]
    return Forwards(known, (last_s - first_s) / (last - first) if last > first else 0.0)


def beside(samples: Iterable[Sample]) -> list[Sample]:
    """Return the forwards during which the other model ran."""
    return [sample for sample in samples if sample.beside >= BESIDE]


def alone(samples: Iterable[Sample]) -> list[Sample]:
    """Return the forwards during which the other model did not run."""
    return [sample for sample in samples if sample.beside <= ALONE]
