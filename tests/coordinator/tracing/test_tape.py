"""What is recorded, until it is taken; and that what is left out is counted."""

from collections.abc import Callable
from zlib import crc32

import pytest

from coordinator.tracing import tape as tapes
from coordinator.tracing.tape import Passed, Tape
from proto.codec import encode, kind_of
from proto.messages import TRACE_RECORD_BYTES, Close, Features, Heartbeat, Role, TracePart
from proto.stopwatch import Phase, records_of
from tests.coordinator.tracing.recordings import TARGET, hello

CLOSE = encode(Close(1, "stop"))
BEAT = encode(Heartbeat((), 1, "", stamp_us=5, clock_us=7))
HELLO = encode(hello(Role.TARGET, "here"))


def counting() -> Callable[[], int]:
    """A clock that is one further each time."""
    now = iter(range(1, 10_000))
    return lambda: next(now)


def come(tape: Tape, frame: bytes, node: bytes = TARGET) -> None:
    """A frame from a node."""
    tape.received(node, kind_of(frame), frame)


def test_it_begins_with_the_first_node_that_is_there() -> None:
    tape = Tape(counting())
    come(tape, BEAT)  # while it loads
    come(tape, HELLO)
    come(tape, BEAT)
    tape.sends(TARGET, CLOSE)
    taken = tape.take()
    assert taken.since_ns == taken.frames[0].ns == 2
    assert taken.frames == [
        Passed(2, TARGET, False, HELLO),
        Passed(3, TARGET, False, BEAT),
        Passed(4, TARGET, True, CLOSE),
    ]
    assert taken.hellos == {TARGET: HELLO}
    assert taken.beats == {TARGET: [taken.frames[1]]}


def test_what_follows_is_another_recording_and_knows_what_went_on() -> None:
    tape = Tape(counting())
    come(tape, HELLO)
    tape.recorder.add(1, Phase.DECIDE)
    parts = [TracePart(number, 0, bytes(TRACE_RECORD_BYTES)) for number in (1, 2, 3)]
    for part in parts[:2]:
        tape.add(TARGET, part)
    assert tape.num_parts(TARGET) == 2
    first = tape.take()
    assert first.parts == {TARGET: parts[:2]}
    assert tape.num_parts(TARGET) == 2
    tape.add(TARGET, parts[2])
    tape.recorder.add(9, Phase.WAIT)
    second = tape.take()
    assert second.frames == []
    assert second.since_ns > first.since_ns
    assert second.parts == {TARGET: parts[1:]}  # the phase that was on is known
    assert [record.ns for record in records_of(second.own)] == [1, 9]
    assert second.hellos == first.hellos


def test_a_stranger_records_nothing() -> None:
    tape = Tape(counting())
    tape.add(b"nobody", TracePart(1, 0, bytes(TRACE_RECORD_BYTES)))
    assert tape.take().parts == {}
    assert tape.num_parts(b"nobody") == 0


def test_what_has_no_room_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tapes, "MAX_RECORDS", 3)
    monkeypatch.setattr(tapes, "MAX_FRAMES", 2)
    tape = Tape(counting())
    come(tape, HELLO)
    for number in range(1, 6):
        tape.sends(TARGET, CLOSE)
        tape.recorder.add(number, Phase.WAIT)
        tape.add(TARGET, TracePart(number, 0, bytes(2 * TRACE_RECORD_BYTES)))
    taken = tape.take()
    assert (len(taken.frames), taken.num_frames_dropped) == (2, 4)
    assert (len(records_of(taken.own)), taken.num_dropped) == (3, 2)
    assert (len(taken.parts[TARGET]), taken.num_records_dropped) == (1, {TARGET: 8})
    tape.sends(TARGET, CLOSE)
    assert len(tape.take().frames) == 1  # there is room again


def test_of_features_only_the_head_is_kept_and_what_they_were_is_known() -> None:
    frame = encode(Features(7, 1, 9, 123, 4, "bfloat16", bytes(range(256)) * 64))
    tape = Tape(counting())
    come(tape, HELLO)
    come(tape, frame)
    tape.sends(b"drafter-1", frame)
    tape.sends(b"drafter-1", CLOSE)
    *_, received, sent, close = tape.take().frames
    for kept in (received, sent):
        assert len(kept.frame) == tapes.HEAD_BYTES < len(frame)
        assert (kept.num_bytes, kept.checksum) == (len(frame), crc32(frame))
    assert (close.num_bytes, close.checksum) == (len(CLOSE), crc32(CLOSE))
