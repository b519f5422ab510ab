"""What a process did, of its records: phases, forwards, and frames that came and went (pure)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from proto.messages import TracePart
from proto.stopwatch import Mark, Phase, Record, records_of

PHASES = tuple(Phase)  # by their numbers
FORWARD_PHASES = (Phase.PREPARE, Phase.MODEL, Phase.CHOOSE)


class Span(NamedTuple):
    """A phase, [start_ns, end_ns)."""

    start_ns: int
    end_ns: int
    phase: Phase


class Forward(NamedTuple):
    """A forward and the choice from its logits, [start_ns, end_ns).

    num_asked  rows whose logits are asked for; of a part of a prefill none
    """

    start_ns: int
    end_ns: int
    num_rows: int
    num_asked: int


class Note(NamedTuple):
    """A frame that came or left: its kind byte and its checksum."""

    ns: int
    is_sent: bool
    kind: int
    checksum: int


@dataclass(slots=True)
class Track:
    """One process, on the coordinator's clock. All lists in the order of time.

    spans     what it did besides waiting; never two at once
    recorded  from when to when it is known; what is in no span there is waiting
    """

    spans: list[Span] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    recorded: list[tuple[int, int]] = field(default_factory=list)


def pieces_of(parts: Sequence[TracePart]) -> tuple[list[list[Record]], int]:
    """The records of a node, piece by piece: between two of them some are missing; and how many
    parts are."""
    pieces: list[list[Record]] = [[]]
    num_missing = 0
    last_number = last_dropped = 0
    for index, part in enumerate(sorted(parts, key=lambda part: part.number)):
        gap = part.number - last_number - 1 if index else 0
        if gap:
            num_missing += gap
            pieces.append([])
        pieces[-1] += records_of(part.records)
        if part.num_dropped > last_dropped and index:
            pieces.append([])  # what was dropped came after what had room
        last_number, last_dropped = part.number, part.num_dropped
    return [piece for piece in pieces if piece], num_missing


def track_of(
    pieces: Iterable[Sequence[Record]], since_ns: int, ours: Callable[[int], int]
) -> Track:
    """The track of a process from `since_ns` on.

    ours  makes of a time of its clock one of ours
    """
    track = Track()
    for piece in pieces:
        reader = _Reader(track, since_ns)
        for record in piece:
            reader.read(record, ours(record.ns))
        reader.end()
    return track


class _Reader:
    """Reads one piece of records into a track."""

    def __init__(self, track: Track, since_ns: int) -> None:
        self._track = track
        self._since_ns = since_ns
        self._phase: Phase | None = None  # unknown before the first switch
        self._start_ns = self._now_ns = 0
        self._first_ns: int | None = None  # of what is recorded
        self._forward: list[int] | None = None  # when it began, its rows, and those asked

    def read(self, record: Record, ns: int) -> None:
        """The next record. One of an unknown mark is of a later release, and means nothing."""
        self._now_ns = ns = max(ns, self._now_ns)
        if record.mark < len(Phase):
            self._enter(PHASES[record.mark], ns)
        elif ns < self._since_ns:
            return
        elif record.mark == Mark.FORWARD and self._forward is not None:
            # The steps of a chain that are one call begin together: their rows add up.
            self._forward[1] += record.detail
            self._forward[2] += record.extra
        elif record.mark in (Mark.RECEIVED, Mark.SENT):
            is_sent = record.mark == Mark.SENT
            self._track.notes.append(Note(ns, is_sent, record.kind, record.detail))

    def end(self) -> None:
        """Nothing is known of what follows."""
        self._close(self._now_ns)
        self._end_forward(self._now_ns)
        if self._first_ns is not None and self._now_ns > self._first_ns:
            self._track.recorded.append((self._first_ns, self._now_ns))

    def _enter(self, phase: Phase, ns: int) -> None:
        self._close(ns)
        if phase not in FORWARD_PHASES or phase is Phase.PREPARE:
            self._end_forward(ns)
        if phase is Phase.PREPARE and ns >= self._since_ns:
            self._forward = [ns, 0, 0]
        if self._first_ns is None:
            self._first_ns = max(ns, self._since_ns)
        self._phase, self._start_ns = phase, ns

    def _close(self, ns: int) -> None:
        start_ns = max(self._start_ns, self._since_ns)
        if self._phase not in (None, Phase.WAIT) and ns > start_ns:
            assert self._phase is not None
            self._track.spans.append(Span(start_ns, ns, self._phase))

    def _end_forward(self, ns: int) -> None:
        if self._forward is not None:
            start_ns, num_rows, num_asked = self._forward
            self._track.forwards.append(Forward(start_ns, ns, num_rows, num_asked))
            self._forward = None
