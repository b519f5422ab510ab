"""What is recorded while texts are written: of the nodes, of the links, of the coordinator (pure).

Nothing is looked at here. The service's loop adds, another thread takes; nothing is added to what
was taken but what was on its way into it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from zlib import crc32

from proto.codec import kind_of
from proto.messages import TRACE_RECORD_BYTES, Features, Heartbeat, Hello, Message, TracePart
from proto.stopwatch import Recorder

# Of one trace. A viewer has trouble with more; all that is left out is counted.
MAX_RECORDS = 1 << 20  # of one process: about two minutes of a quick pair
MAX_FRAMES, MAX_FRAME_BYTES = 1 << 19, 1 << 28
MAX_NODES = 64
NUM_BEATS = 1 << 12  # of a node: 17 minutes
HEAD_BYTES = 64  # of features: text, length, hash; the numbers would take the room of all else


class Passed(NamedTuple):
    """A frame that the coordinator has received from a node, or sends to one.

    ns     on the coordinator's clock
    frame  of features only its head
    whole  of what is kept in part: its bytes, and its checksum
    """

    ns: int
    node: bytes
    is_sent: bool
    frame: bytes
    whole: tuple[int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """Of the frame."""
        return len(self.frame) if self.whole is None else self.whole[0]

    @property
    def checksum(self) -> int:
        """Of the frame, as the nodes say it (`proto.stopwatch`)."""
        return crc32(self.frame) if self.whole is None else self.whole[1]


@dataclass(slots=True)
class Recording:
    """What has come since `since_ns`, and what told the same before: a part of each process.

    own      the coordinator's records, packed
    parts    of each node
    frames   in the order of time
    hellos   how the nodes have introduced themselves; of all that ever did
    beats    the nodes' heartbeats, of which the clocks are told; likewise
    num_dropped, num_frames_dropped  the coordinator's records and frames without room
    num_records_dropped  of each node, those that have come and had no room here
    """

    since_ns: int
    own: bytes = b""
    parts: dict[bytes, list[TracePart]] = field(default_factory=dict)
    frames: list[Passed] = field(default_factory=list)
    hellos: dict[bytes, bytes] = field(default_factory=dict)
    beats: dict[bytes, list[Passed]] = field(default_factory=dict)
    num_dropped: int = 0
    num_frames_dropped: int = 0
    num_records_dropped: dict[bytes, int] = field(default_factory=dict)


class Tape:
    """Collects it. `recorder` is for the coordinator's own loop.

    clock  nanoseconds, the one of that loop
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.recorder = Recorder(MAX_RECORDS)
        self._now = Recording(0)
        self._num_bytes = 0
        self._num_records: dict[bytes, int] = {}
        self._hellos: dict[bytes, bytes] = {}
        self._beats: dict[bytes, deque[Passed]] = {}

    def received(self, node: bytes, kind: type[Message], frame: bytes) -> None:
        """A frame of this kind has come."""
        now_ns = self._clock()
        if kind is Hello and (node in self._hellos or len(self._hellos) < MAX_NODES):
            if not self._hellos:
                self._now.since_ns = now_ns
            self._hellos[node] = frame
        elif not self._hellos:
            return  # the nodes are loading: nothing to see yet
        # What the nodes have recorded is kept elsewhere.
        kept = frame[:1] if kind is TracePart else frame
        passed = Passed(now_ns, node, is_sent=False, frame=kept)
        if kind is Heartbeat and node in self._hellos:
            self._beats.setdefault(node, deque(maxlen=NUM_BEATS)).append(passed)
        self._add(passed)

    def sends(self, node: bytes, frame: bytes) -> None:
        """A frame leaves now."""
        self._add(Passed(self._clock(), node, is_sent=True, frame=frame))

    def _add(self, passed: Passed) -> None:
        frame = passed.frame
        if len(frame) > HEAD_BYTES and kind_of(frame) is Features:
            whole = len(frame), crc32(frame)
            passed = passed._replace(frame=frame[:HEAD_BYTES], whole=whole)
        self._num_bytes += len(passed.frame)
        if len(self._now.frames) < MAX_FRAMES and self._num_bytes <= MAX_FRAME_BYTES:
            self._now.frames.append(passed)
        else:
            self._now.num_frames_dropped += 1

    def add(self, node: bytes, part: TracePart) -> None:
        """A node says what it did."""
        if node not in self._hellos:
            return
        now = self._now
        num_records = len(part.records) // TRACE_RECORD_BYTES
        self._num_records[node] = self._num_records.get(node, 0) + num_records
        if self._num_records[node] <= MAX_RECORDS:
            now.parts.setdefault(node, []).append(part)
        else:
            dropped = now.num_records_dropped
            dropped[node] = dropped.get(node, 0) + num_records

    def num_parts(self, node: bytes) -> int:
        """How many parts this node has said, since it was started."""
        parts = self._now.parts.get(node)
        return parts[-1].number if parts else 0

    def take(self) -> Recording:
        """All of it; recording starts anew, where this ends."""
        taken, now_ns = self._now, self._clock()
        self._now = Recording(now_ns)
        # What a process did last goes on: its last phase ends with what it says next.
        self._now.parts = {node: parts[-1:] for node, parts in tuple(taken.parts.items())}
        self._num_records, self._num_bytes = {}, 0
        taken.own += self.recorder.take()
        self._now.own = taken.own[-64 * TRACE_RECORD_BYTES :]
        num_dropped, self.recorder.num_dropped = self.recorder.num_dropped, 0
        beats = {node: list(latest) for node, latest in tuple(self._beats.items())}
        return replace(taken, num_dropped=num_dropped, hellos=dict(self._hellos), beats=beats)
