"""Where the time of a loop goes: every moment belongs to one phase, and a switch costs little.

The sums are kept at all times. Where a trace is wanted, a recorder keeps every switch as well, and
every message: 16 bytes each, in one buffer that another thread may empty.
"""

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from proto.messages import MAX_TRACE_RECORDS, TRACE_RECORD_BYTES


class Phase(IntEnum):
    """What a loop is doing. A process without a model has no use for the middle ones."""

    WAIT = 0  # for messages, and taking them from the socket
    DECODE = 1
    DECIDE = 2  # the state machine: tree, slots, launch rule
    PREPARE = 3  # masks and tensors
    MODEL = 4
    CHOOSE = 5  # processors, noise, sampling; on a GPU the wait for the model is here
    MOVE = 6  # cache rows
    SEND = 7  # encoding included


class Mark(IntEnum):
    """What is recorded besides the phases, which are marks of their own numbers."""

    FORWARD = 16  # one begins: of detail rows, extra are asked
    RECEIVED = 17  # a frame has come: its kind byte, and its checksum as the detail
    SENT = 18  # a frame is about to leave: likewise


class Record(NamedTuple):
    """At `ns` of the loop's clock a phase began, or something happened.

    mark  a Phase or a Mark
    """

    ns: int
    mark: int
    kind: int
    extra: int
    detail: int


_RECORD = struct.Struct("<qBBHI")
assert _RECORD.size == TRACE_RECORD_BYTES
_U16, _U32 = (1 << 16) - 1, (1 << 32) - 1


def records_of(packed: bytes) -> list[Record]:
    """The records in what a recorder gave."""
    return [Record(*fields) for fields in _RECORD.iter_unpack(packed)]


class Recorder:
    """Records, at most `most` of them until they are taken. One thread adds, another may take.

    num_dropped  those that there was no room for
    """

    def __init__(self, most: int = MAX_TRACE_RECORDS) -> None:
        self._most_bytes = most * TRACE_RECORD_BYTES
        self._packed = bytearray()  # appended to and cut in single steps of the interpreter
        self.num_dropped = 0

    def add(self, ns: int, mark: int, kind: int = 0, extra: int = 0, detail: int = 0) -> None:
        """Append a record. `ns` is not before the last one's."""
        if len(self._packed) >= self._most_bytes:
            self.num_dropped += 1
            return
        self._packed += _RECORD.pack(ns, mark, kind, min(extra, _U16), min(detail, _U32))

    def take(self) -> bytes:
        """All that are there; they are gone afterwards."""
        packed = bytes(self._packed)
        del self._packed[: len(packed)]
        return packed


class Stopwatch:
    """Adds up nanoseconds per phase. One thread uses it; any thread may read `totals_us`.

    clock  nanoseconds of a monotonic clock
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._totals = [0] * len(Phase)
        self._phase = Phase.WAIT
        self._since = clock()
        self._recorder: Recorder | None = None

    def record(self, recorder: Recorder) -> None:
        """From now on the recorder is told of everything."""
        recorder.add(self._clock(), self._phase)
        self._recorder = recorder

    def enter(self, phase: Phase) -> None:
        """End the phase that was and begin another."""
        now = self._clock()
        self._totals[self._phase] += now - self._since
        if self._recorder is not None and phase is not self._phase:
            self._recorder.add(now, phase)
        self._phase = phase
        self._since = now

    def forward(self, num_rows: int, num_asked: int) -> None:
        """A forward of so many rows begins; so many of them are asked for their logits."""
        if self._recorder is not None:
            self._recorder.add(self._clock(), Mark.FORWARD, extra=num_asked, detail=num_rows)

    def received(self, frame: bytes) -> None:
        """A frame has come."""
        if self._recorder is not None and frame:
            self._recorder.add(self._clock(), Mark.RECEIVED, frame[0], detail=crc32(frame))

    def sends(self, frame: bytes) -> None:
        """A frame leaves now; before it has left, so that it never arrives before."""
        if self._recorder is not None:
            self._recorder.add(self._clock(), Mark.SENT, frame[0], detail=crc32(frame))

    @property
    def totals_us(self) -> tuple[int, ...]:
        """Microseconds in each phase so far, but for the one that is going on."""
        return tuple(total // 1000 for total in self._totals)
