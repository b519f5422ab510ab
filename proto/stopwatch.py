"""Measures how long a loop spends in each phase; every moment belongs to exactly one phase.

A device may be at work on a forward pass while the host is free. The host's work during that time
delays nothing, so it has sums of its own: the time of each phase is counted as *beside* a forward
pass or as *exposed*.

The sums are always kept. For a trace, a recorder also keeps every switch of phase and every
message: 16 bytes each, in one buffer that another thread may empty.
"""

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from proto.messages import MAX_TRACE_RECORDS, TRACE_RECORD_BYTES


class Phase(IntEnum):
    """What a loop is doing. A process without a model never enters PREPARE to MOVE."""

    WAIT = 0  # waiting for messages or a device, and taking messages from the socket
    DECODE = 1
    DECIDE = 2  # the state machine: tree, slots, launch rule
    PREPARE = 3  # masks and tensors
    MODEL = 4  # the host computes the forward pass, or gives it to a device
    CHOOSE = 5  # processors, noise, sampling; on a GPU the wait for the model is included
    MOVE = 6  # moving rows of the cache
    SEND = 7  # encoding and sending messages


class Mark(IntEnum):
    """Events that are recorded besides the starts of phases.

    Numbers of a `Phase` are marks as well.
    """

    FORWARD = 16  # a forward begins: `detail` is its rows, `extra` those whose logits are wanted
    RECEIVED = 17  # a frame has arrived: `kind` is its kind byte, `detail` its checksum
    SENT = 18  # a frame is about to leave: kind and detail likewise
    LAUNCHED = 19  # a device is at work on the forward, and the host is free
    ENDED = 20  # the device has ended the forward


class Record(NamedTuple):
    """States that a phase began, or that an event happened, at time `ns` of the loop's clock.

    mark  a Phase or a Mark
    kind, extra, detail  see `Mark`
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
    """Return the records in bytes that `Recorder.take` returned."""
    return [Record(*fields) for fields in _RECORD.iter_unpack(packed)]


class Recorder:
    """Collects at most `most` records until they are taken. One thread adds, another may take.

    num_dropped  number of records so far for which there was no room
    """

    def __init__(self, most: int = MAX_TRACE_RECORDS) -> None:
        self._most_bytes = most * TRACE_RECORD_BYTES
        self._packed = bytearray()  # appending and cutting are atomic steps
        self.num_dropped = 0

    def add(self, ns: int, mark: int, kind: int = 0, extra: int = 0, detail: int = 0) -> None:
        """Append a record, or count it as dropped if there is no room. `ns` must not decrease."""
        if len(self._packed) >= self._most_bytes:
            self.num_dropped += 1
            return
        self._packed += _RECORD.pack(ns, mark, kind, min(extra, _U16), min(detail, _U32))

    def take(self) -> bytes:
        """Return all records as bytes and remove them."""
        packed = bytes(self._packed)
        del self._packed[: len(packed)]
        return packed


NEVER = 1 << 63


class Stopwatch:
    """Adds up the nanoseconds of each phase. One thread uses it; any thread may read the totals.

    clock  nanoseconds of a monotonic clock
    num_received  frames that have arrived so far
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._exposed = [0] * len(Phase)
        self._beside = [0] * len(Phase)  # the same phases while a device was at work
        self._sums = self._exposed  # that of the two to which time is added now
        self._phase = Phase.WAIT
        self._since = clock()
        # When the device's forward ends; NEVER: there is none, or the time is unknown.
        self._ends = NEVER
        self._recorder: Recorder | None = None
        self.num_received = 0

    def record(self, recorder: Recorder) -> None:
        """Tell the recorder of every phase, frame and forward from now on."""
        recorder.add(self._clock(), self._phase)
        self._recorder = recorder

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin this one."""
        now = self._clock()
        if now >= self._ends:
            self._end(self._ends)
        self._sums[self._phase] += now - self._since
        if self._recorder is not None and phase is not self._phase:
            self._recorder.add(now, phase)
        self._phase = phase
        self._since = now

    def forward(self, num_rows: int, num_asked: int) -> None:
        """Record that a forward of `num_rows` rows begins; the logits of `num_asked` are wanted."""
        if self._recorder is not None:
            self._recorder.add(self._clock(), Mark.FORWARD, extra=num_asked, detail=num_rows)

    def device_begins(self) -> None:
        """Note that a device is at work from now on, and the host is free until `device_ended`.

        An earlier forward whose end was not reported ends now.
        """
        self.device_ended()
        now = self._clock()
        self._count_until(now)
        self._sums = self._beside
        if self._recorder is not None:
            self._recorder.add(now, Mark.LAUNCHED)

    def device_ends_in(self, left_s: float) -> None:
        """Note that the device, if it is at work, ends in `left_s` seconds.

        From that moment on the host's time does not count as beside the forward, whatever the host
        does.
        """
        if self._sums is self._beside:
            self._ends = self._clock() + round(left_s * 1e9)

    def device_ended(self) -> None:
        """Note that the device is idle: since the time it was to end, or else from now on."""
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
        """Add the time of the current phase up to `ns`; the rest of the phase is added later."""
        self._sums[self._phase] += ns - self._since
        self._since = ns

    def received(self, frame: bytes) -> None:
        """Count a frame that has arrived, and record it."""
        self.num_received += 1
        if self._recorder is not None and frame:
            self._recorder.add(self._clock(), Mark.RECEIVED, frame[0], detail=crc32(frame))

    def sends(self, frame: bytes) -> None:
        """Record that a frame is about to leave; called first, so that it cannot arrive earlier."""
        if self._recorder is not None:
            self._recorder.add(self._clock(), Mark.SENT, frame[0], detail=crc32(frame))

    @property
    def totals_us(self) -> tuple[int, ...]:
        """Return the microseconds in each phase while no device was at work, as far as counted.

        Of the phase that is going on, only what was added already.
        """
        return tuple(total // 1000 for total in self._exposed)

    @property
    def beside_us(self) -> tuple[int, ...]:
        """Return the microseconds in each phase while a device was at work.

        Their sum is the time of the device's forwards.
        """
        return tuple(total // 1000 for total in self._beside)
