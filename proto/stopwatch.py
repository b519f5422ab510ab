"""Where the time of a loop goes: every moment belongs to one phase, and a switch costs little.

A device may be at work on a forward while the host is free. The host's work under that forward
delays nothing, so it has sums of its own: each phase is counted *beside* a forward or *exposed*.

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

    WAIT = 0  # for messages or a device, and taking messages from the socket
    DECODE = 1
    DECIDE = 2  # the state machine: tree, slots, launch rule
    PREPARE = 3  # masks and tensors
    MODEL = 4  # the host computes it, or gives it to a device
    CHOOSE = 5  # processors, noise, sampling; on a GPU the wait for the model is here
    MOVE = 6  # cache rows
    SEND = 7  # encoding included


class Mark(IntEnum):
    """What is recorded besides the phases, which are marks of their own numbers."""

    FORWARD = 16  # one begins: of detail rows, extra are asked
    RECEIVED = 17  # a frame has come: its kind byte, and its checksum as the detail
    SENT = 18  # a frame is about to leave: likewise
    LAUNCHED = 19  # a device is at work on the forward, and the host is free
    ENDED = 20  # the device has ended it


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


NEVER = 1 << 63


class Stopwatch:
    """Adds up nanoseconds per phase. One thread uses it; any thread may read `totals_us`
    and `beside_us`.

    clock  nanoseconds of a monotonic clock
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._exposed = [0] * len(Phase)
        self._beside = [0] * len(Phase)  # the same phases while a device was at work
        self._sums = self._exposed  # the one of the two that the current moment belongs to
        self._phase = Phase.WAIT
        self._since = clock()
        # When the device ends what it is at; NEVER: it is at nothing, or nobody knows.
        self._ends = NEVER
        self._recorder: Recorder | None = None

    def record(self, recorder: Recorder) -> None:
        """From now on the recorder is told of everything."""
        recorder.add(self._clock(), self._phase)
        self._recorder = recorder

    def enter(self, phase: Phase) -> None:
        """End the phase that was and begin another."""
        now = self._clock()
        if now >= self._ends:
            self._end(self._ends)
        self._sums[self._phase] += now - self._since
        if self._recorder is not None and phase is not self._phase:
            self._recorder.add(now, phase)
        self._phase = phase
        self._since = now

    def forward(self, num_rows: int, num_asked: int) -> None:
        """A forward of so many rows begins; so many of them are asked for their logits."""
        if self._recorder is not None:
            self._recorder.add(self._clock(), Mark.FORWARD, extra=num_asked, detail=num_rows)

    def device_begins(self) -> None:
        """A device is at work from now on, and the host is free until `device_ended`.

        What it was at before, if nobody has said that this ended, ends now.
        """
        self.device_ended()
        now = self._clock()
        self._count_until(now)
        self._sums = self._beside
        if self._recorder is not None:
            self._recorder.add(now, Mark.LAUNCHED)

    def device_ends_in(self, left_s: float) -> None:
        """The device, if it is at work, ends so soon. Whatever the host does then, from that
        moment on it does not count as beside the forward."""
        if self._sums is self._beside:
            self._ends = self._clock() + round(left_s * 1e9)

    def device_ended(self) -> None:
        """The device is at work no more: since it was to end, or else from now on."""
        if self._sums is self._beside:
            self._end(min(self._ends, self._clock()))

    def _end(self, ns: int) -> None:
        ns = max(ns, self._since)
        self._count_until(ns)
        self._sums = self._exposed
        self._ends = NEVER
        if self._recorder is not None:
            self._recorder.add(ns, Mark.ENDED)

    def _count_until(self, ns: int) -> None:
        """Count what there is of the current phase; the rest of it is counted later."""
        self._sums[self._phase] += ns - self._since
        self._since = ns

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
        """Microseconds in each phase so far while no device was at work; of the phase that is
        going on only what is counted already."""
        return tuple(total // 1000 for total in self._exposed)

    @property
    def beside_us(self) -> tuple[int, ...]:
        """The same while a device was at work: its forwards took the sum of them."""
        return tuple(total // 1000 for total in self._beside)
