"""Records what nodes, links and coordinator do while texts are generated (pure).

Nothing is interpreted here. The service's loop adds records; another thread takes a recording.
After that only a record that was just being added can still get into the recording that was taken.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from zlib import crc32

from proto.codec import kind_of
from proto.messages import TRACE_RECORD_BYTES, Features, Heartbeat, Hello, Message, TracePart
from proto.stopwatch import Recorder

# Limits of one trace. A viewer has trouble with more; records that are left out are counted.
MAX_RECORDS = 1 << 20  # of one process: about two minutes of a fast pair of models
MAX_FRAMES, MAX_FRAME_BYTES = 1 << 19, 1 << 28
MAX_NODES = 64
NUM_BEATS = 1 << 12  # heartbeats that are kept of a node: 17 minutes
HEAD_BYTES = 64  # kept of a Features message: session, length, hash; its data are too large


class Passed(NamedTuple):
    """A frame that the coordinator has received from a node or sent to one.

    ns     the time, on the coordinator's clock
    frame  the bytes of the message; of a Features message only the first HEAD_BYTES
    whole  for a frame that is kept in part: number of bytes and checksum of the whole frame
    """

    ns: int
    node: bytes
    is_sent: bool
    frame: bytes
    whole: tuple[int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """Return the length of the whole frame in bytes."""
        return len(self.frame) if self.whole is None else self.whole[0]

    @property
    def checksum(self) -> int:
        """Return the CRC-32 of the whole frame, as the nodes report it (`proto.stopwatch`)."""
        return crc32(self.frame) if self.whole is None else self.whole[1]


@dataclass(slots=True)
class Recording:
    """Everything recorded since `since_ns`, and the last records before it: a phase may go on.

    own      the coordinator's records, packed
    parts    the TracePart messages of each node
    frames   the frames that passed the coordinator, in the order of time
    hellos   the Hello frame of every node that ever introduced itself
    beats    the latest heartbeats of every node, from which its clock is estimated
    num_dropped, num_frames_dropped  the coordinator's records and frames that had no room
    num_records_dropped  by node: records that have come and had no room here
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
    """Collects the recording of a coordinator and its nodes. `recorder` is for the service's loop.

    clock  returns nanoseconds; the same clock that the service's loop uses
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
        """Record a frame of message type `kind` that has come from a node."""
        now_ns = self._clock()
        if kind is Hello and (node in self._hellos or len(self._hellos) < MAX_NODES):
            if not self._hellos:
                self._now.since_ns = now_ns
            self._hellos[node] = frame
        elif not self._hellos:
            return  # the nodes are loading: nothing to record yet
        # The records inside a TracePart are kept by `add`.
        kept = frame[:1] if kind is TracePart else frame
        passed = Passed(now_ns, node, is_sent=False, frame=kept)
        if kind is Heartbeat and node in self._hellos:
            self._beats.setdefault(node, deque(maxlen=NUM_BEATS)).append(passed)
        self._add(passed)

    def sends(self, node: bytes, frame: bytes) -> None:
        """Record a frame that is being sent to a node now."""
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
        """Keep the records that a node has sent of what it did."""
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
        """Return the number of the latest TracePart of this node; 0 if none was kept."""
        parts = self._now.parts.get(node)
        return parts[-1].number if parts else 0

    def take(self) -> Recording:
        """Return everything recorded so far and start a new recording."""
        taken, now_ns = self._now, self._clock()
        self._now = Recording(now_ns)
        # Keep each process's last records: its last phase ends only with its next record.
        self._now.parts = {node: parts[-1:] for node, parts in tuple(taken.parts.items())}
        self._num_records, self._num_bytes = {}, 0
        taken.own += self.recorder.take()
        self._now.own = taken.own[-64 * TRACE_RECORD_BYTES :]
        num_dropped, self.recorder.num_dropped = self.recorder.num_dropped, 0
        beats = {node: list(latest) for node, latest in tuple(self._beats.items())}
        return replace(taken, num_dropped=num_dropped, hellos=dict(self._hellos), beats=beats)
