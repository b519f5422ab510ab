"""Finds the path of each message by matching the checksums at both ends of a link (pure).

Every message passes the coordinator, whose frames are kept; a node reports the checksums of the
frames that it has sent and received. A frame that the coordinator passes on is one message with
several hops (a hop is one way between a node and the coordinator).
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.text.watching import depth_of, num_right
from coordinator.tracing.tape import Passed
from proto.codec import decode, kind_of, session_of
from proto.errors import RemoteProtocolError
from proto.messages import Draft, Features, Message, Open, TracePart, Verdict
from proto.stopwatch import Mark, Phase, Record, records_of
from proto.tree import EMPTY_HASH, path_hash

# -- tracks ----------------------------------------------------------------------------------------

# What a process did, made from its records: phases, forward passes, frames received and sent.

PHASES = tuple(Phase)  # indexed by the number of the phase
FORWARD_PHASES = (Phase.PREPARE, Phase.MODEL, Phase.CHOOSE)


class Span(NamedTuple):
    """A phase of a process's loop (such as decode or model) in the time [start_ns, end_ns)."""

    start_ns: int
    end_ns: int
    phase: Phase


class Forward(NamedTuple):
    """A forward pass and the choice of tokens from its logits, in the time [start_ns, end_ns).

    num_asked  number of rows whose logits are wanted; 0 for a part of a prefill
    on_device  True: a device computed from the launch to the end, and the host was free meanwhile.
               False: the host prepared, computed and chose, in phases within the forward
    """

    start_ns: int
    end_ns: int
    num_rows: int
    num_asked: int
    on_device: bool = False


class Note(NamedTuple):
    """A record of a frame that a node has received or sent: its kind byte and its checksum."""

    ns: int
    is_sent: bool
    kind: int
    checksum: int


@dataclass(slots=True)
class Track:
    """What one process did, on the coordinator's clock. All lists are in the order of time.

    spans     phases of its loop other than waiting; they do not overlap
    forwards  forward passes; they do not overlap
    notes     frames that were received or sent
    recorded  times (start, end) for which there are records; what is in no span there is waiting
    """

    spans: list[Span] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    recorded: list[tuple[int, int]] = field(default_factory=list)


def pieces_of(parts: Sequence[TracePart]) -> tuple[list[list[Record]], int]:
    """Return a node's records, split where some are missing, and the number of missing parts."""
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
            pieces.append([])  # records are dropped after the buffer is full
        last_number, last_dropped = part.number, part.num_dropped
    return [piece for piece in pieces if piece], num_missing


def track_of(
    pieces: Iterable[Sequence[Record]], since_ns: int, ours: Callable[[int], int]
) -> Track:
    """Return the track of a process from `since_ns` on, made from its records.

    pieces  lists of records without a gap
    ours    converts a time of the process's clock to our clock; nanoseconds
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
        self._first_ns: int | None = None  # when the records of this piece begin
        self._forward: list[int] | None = None  # start in ns, num_rows, num_asked
        self._on_device: list[int] | None = None  # the same, for a forward that a device computes

    def read(self, record: Record, ns: int) -> None:
        """Read the next record, at `ns` of our clock; unknown marks are ignored."""
        self._now_ns = ns = max(ns, self._now_ns)
        if record.mark < len(Phase):
            self._enter(PHASES[record.mark], ns)
        elif ns < self._since_ns:
            return
        elif record.mark == Mark.FORWARD and self._forward is not None:
            # The draft steps of a chain that run in one call begin together: add their rows.
            self._forward[1] += record.detail
            self._forward[2] += record.extra
        elif record.mark == Mark.LAUNCHED:
            self._end_on_device(ns)
            if self._forward is not None:
                self._on_device = [ns, *self._forward[1:]]
                self._forward = None
        elif record.mark == Mark.ENDED:
            self._end_on_device(ns)
        elif record.mark in (Mark.RECEIVED, Mark.SENT):
            is_sent = record.mark == Mark.SENT
            self._track.notes.append(Note(ns, is_sent, record.kind, record.detail))

    def end(self) -> None:
        """End the open phase and forwards at the last record: what follows is not known."""
        self._close(self._now_ns)
        self._end_forward(self._now_ns)
        self._end_on_device(self._now_ns)
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

    def _end_on_device(self, ns: int) -> None:
        if self._on_device is not None:
            start_ns, num_rows, num_asked = self._on_device
            forward = Forward(start_ns, ns, num_rows, num_asked, on_device=True)
            self._track.forwards.append(forward)
            self._on_device = None


# -- hops ------------------------------------------------------------------------------------------

FEATURES = Features.__name__


@dataclass(frozen=True, slots=True)
class Hop:
    """A message on one link, in one direction. Times in nanoseconds of the coordinator's clock.

    number      number of the message; the same on each of its hops
    kind        the name of the message's type
    node        the node at one end of the link; the coordinator is at the other
    is_to_node  True: from the coordinator to the node; False: the other way
    message     None: it never came to the coordinator, cannot be decoded, or is a Features message,
                which is not decoded
    session     the text that the message belongs to; 0: none
    sent_ns, received_ns  None: not reported; a lost message has no received_ns. As two clocks may
                disagree, received_ns may be less than sent_ns
    """

    number: int
    kind: str
    node: bytes
    is_to_node: bool
    num_bytes: int
    message: Message | None
    sent_ns: int | None
    received_ns: int | None
    session: int = 0


def hops_of(
    frames: Sequence[Passed], notes: Mapping[bytes, Sequence[Note]], slack_ns: int = 0
) -> list[Hop]:
    """Return the hops of all frames that passed the coordinator, then those of frames lost before.

    The first are in the order of `frames`; the others left a node and never came here.

    notes     by node: the frames that it reports to have received or sent
    slack_ns  the error of the clocks: a frame may seem to have come this much before it was sent
    """
    matches = _Matches(frames, notes, slack_ns)
    hops: list[Hop] = []
    numbers: dict[bytes, int] = {}  # number of the message by its frame
    messages: dict[int, Message | None] = {}
    for index, passed in enumerate(frames):
        frame = passed.frame
        if not passed.is_sent or frame not in numbers:
            numbers[frame] = number = len(messages) + 1
            messages[number] = None if _kind(frame[:1]) == FEATURES else decoded(frame)
        number = numbers[frame]
        ends: tuple[int | None, int | None] = matches.sent[index], passed.ns
        if passed.is_sent:
            ends = passed.ns, matches.received[index]
        kind, message = _kind(frame[:1]), messages[number]
        session = _session(frame) if kind == FEATURES else getattr(message, "session", 0)
        what = number, kind, passed.node, passed.is_sent, passed.num_bytes, message
        hops.append(Hop(*what, *ends, session))
    for node, note in matches.lost:
        number = len(messages) + 1
        messages[number] = None
        kind = _kind(bytes([note.kind]))
        hops.append(Hop(number, kind, node, False, 0, None, note.ns, None))
    return hops


class _Matches:
    """Matches the coordinator's frames with what the nodes report of them.

    sent      by index of a frame that came from a node: when the node says it sent it
    received  by index of a frame that was sent to a node: when the node says it came
    lost      (node, note) of frames that nodes say they sent and that never came
    """

    def __init__(
        self, frames: Sequence[Passed], notes: Mapping[bytes, Sequence[Note]], slack_ns: int
    ) -> None:
        self.sent: dict[int, int | None] = defaultdict(lambda: None)
        self.received: dict[int, int | None] = defaultdict(lambda: None)
        self.lost: list[tuple[bytes, Note]] = []
        passed: dict[tuple[bytes, bool, int], list[int]] = defaultdict(list)
        for index, one in enumerate(frames):
            passed[one.node, one.is_sent, one.checksum].append(index)
        said: dict[tuple[bytes, bool, int], list[Note]] = defaultdict(list)
        for node, of_node in notes.items():
            for note in of_node:
                said[node, not note.is_sent, note.checksum].append(note)
        for key, of_key in said.items():
            node, is_to_node, _ = key
            indices = passed.get(key, [])
            here, there = [frames[index].ns for index in indices], [note.ns for note in of_key]
            if is_to_node:
                for mine, theirs in _pairs(here, there, slack_ns):
                    self.received[indices[mine]] = there[theirs]
            else:
                pairs = _pairs(there, here, slack_ns)
                for theirs, mine in pairs:
                    self.sent[indices[mine]] = there[theirs]
                came = {theirs for theirs, _ in pairs}
                self.lost += [(node, one) for n, one in enumerate(of_key) if n not in came]


def _pairs(sent: Sequence[int], received: Sequence[int], slack_ns: int) -> list[tuple[int, int]]:
    """Match equal frames: return (index in `sent`, index in `received`), the last pair first.

    A received frame is matched with the latest one that was sent before it. So where a frame was
    lost and sent again, the second one does not seem to have taken the time of both.
    """
    pairs: list[tuple[int, int]] = []
    last = len(sent) - 1
    for index in range(len(received) - 1, -1, -1):
        while last >= 0 and sent[last] > received[index] + slack_ns:
            last -= 1
        if last < 0:
            break
        pairs.append((last, index))
        last -= 1
    return pairs


def decoded(frame: bytes) -> Message | None:
    """Return the message in a frame; None if it cannot be decoded."""
    try:
        return decode(frame)
    except RemoteProtocolError:
        return None


def _session(frame: bytes) -> int:
    """Return the session number in a Features frame; 0 if it cannot be decoded."""
    try:
        return session_of(frame)
    except RemoteProtocolError:
        return 0


def _kind(first: bytes) -> str:
    try:
        return kind_of(first).__name__
    except RemoteProtocolError:
        return "garbled frame"


# -- texts -----------------------------------------------------------------------------------------

# The texts of a trace, and the fate of each draft: which verdict decided it, and how.


@dataclass(slots=True)
class RecordedText:
    """One text as far as it was recorded: its committed tokens and its verdicts.

    tokens    the committed tokens, prompt included
    hashes    path hashes of its prefixes; `hashes[n]` names the first n tokens
    decided   length of the text before each of `verdicts`; ascending
    verdicts  verdicts that made the text longer, in the order in which the coordinator got them
    """

    session: int
    opened: Open
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=lambda: [EMPTY_HASH])
    decided: list[int] = field(default_factory=list)
    verdicts: list[Hop] = field(default_factory=list)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens and the path hashes of the longer text."""
        for token in tokens:
            self.hashes.append(path_hash(self.hashes[-1], token, self.opened.key))
            self.tokens.append(token)


@dataclass(frozen=True, slots=True)
class Fate:
    """Whether a draft was right: how many of its tokens became part of the text.

    decided    the verdict that made the text longer than the draft's parent; a draft that is not on
               the text's path then is rejected by it
    num_right  number of the draft's tokens that the text has
    """

    decided: Hop
    num_right: int


@dataclass(frozen=True, slots=True)
class Judged:
    """The first verdict, after the target read a draft, that could use the draft.

    num_accepted  how many of the draft's tokens this verdict accepted
    """

    verdict: Hop
    num_accepted: int


def texts_of(hops: Sequence[Hop]) -> dict[int, RecordedText]:
    """Return the texts by session number, in the order in which they were opened."""
    texts: dict[int, RecordedText] = {}
    for hop in hops:
        match hop.message:
            case Open() as opened if hop.is_to_node:
                text = texts.setdefault(opened.session, RecordedText(opened.session, opened))
                text.extend(opened.tokens[len(text.tokens) :])
            case Verdict() as verdict if not hop.is_to_node and verdict.session in texts:
                text = texts[verdict.session]
                num_known = len(text.tokens) - verdict.base_len
                if 0 <= num_known < len(verdict.tokens):
                    text.decided.append(len(text.tokens))
                    text.verdicts.append(hop)
                    text.extend(verdict.tokens[num_known:])
    return texts


def fate_of(draft: Draft, text: RecordedText) -> Fate | None:
    """Return how much of a draft was right and which verdict decided it; None: undecided."""
    if not text.decided or not text.decided[0] <= draft.parent_len < len(text.tokens):
        return None
    decided = text.verdicts[bisect_right(text.decided, draft.parent_len) - 1]
    return Fate(decided, num_right(draft, text.tokens, text.hashes))


def judged(draft: Draft, read_ns: int, text: RecordedText) -> Judged | None:
    """Return the first verdict that could use a draft which the target read at `read_ns`.

    None: the text was already past the draft, or no verdict followed.
    """
    index = bisect_left(text.verdicts, read_ns, key=lambda hop: hop.sent_ns or 0)
    if index == len(text.verdicts):
        return None
    base_len, verdict = text.decided[index], text.verdicts[index]
    if draft.parent_len + depth_of(draft) <= base_len:
        return None
    first = max(base_len, draft.parent_len)
    last = base_len + getattr(verdict.message, "num_accepted", 0)
    if draft.parent_len < len(text.tokens):
        last = min(last, draft.parent_len + num_right(draft, text.tokens, text.hashes))
    return Judged(verdict, max(0, last - first))
