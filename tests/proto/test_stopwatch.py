"""Every moment of a loop belongs to one phase."""

from zlib import crc32

from proto.messages import MAX_TRACE_RECORDS, TRACE_RECORD_BYTES
from proto.stopwatch import Mark, Phase, Record, Recorder, Stopwatch, records_of


def test_time_goes_to_the_phase_that_was_on() -> None:
    now = iter([1_000, 5_000, 7_000, 10_000, 99_000])
    watch = Stopwatch(lambda: next(now))
    watch.enter(Phase.MODEL)  # 4 us of waiting
    watch.enter(Phase.MODEL)
    watch.enter(Phase.SEND)  # 5 us of both
    expected = {Phase.WAIT: 4, Phase.MODEL: 5}
    assert watch.totals_us == tuple(expected.get(phase, 0) for phase in Phase)
    watch.enter(Phase.WAIT)
    assert watch.totals_us[Phase.SEND] == 89


def test_a_recorder_is_told_of_every_switch_and_every_frame() -> None:
    now = iter(range(100, 2000, 100))
    watch = Stopwatch(lambda: next(now))
    watch.received(b"nobody is told")
    watch.enter(Phase.DECIDE)
    recorder = Recorder()
    watch.record(recorder)
    watch.enter(Phase.DECIDE)  # no switch
    watch.received(b"\x01abc")
    watch.forward(9, 3)
    watch.enter(Phase.SEND)
    watch.sends(b"\x02de")
    assert records_of(recorder.take()) == [
        Record(300, Phase.DECIDE, 0, 0, 0),
        Record(500, Mark.RECEIVED, 1, 0, crc32(b"\x01abc")),
        Record(600, Mark.FORWARD, 0, 3, 9),
        Record(700, Phase.SEND, 0, 0, 0),
        Record(800, Mark.SENT, 2, 0, crc32(b"\x02de")),
    ]
    assert recorder.take() == b""


def test_what_there_is_no_room_for_is_counted() -> None:
    recorder = Recorder(2)
    for ns in range(5):
        recorder.add(ns, Phase.WAIT)
    assert [record.ns for record in records_of(recorder.take())] == [0, 1]
    assert recorder.num_dropped == 3
    recorder.add(9, Mark.FORWARD, extra=1 << 20, detail=1 << 40)
    (record,) = records_of(recorder.take())
    assert (record.extra, record.detail) == ((1 << 16) - 1, (1 << 32) - 1)


def test_a_full_recorder_fits_a_message() -> None:
    recorder = Recorder()
    for ns in range(MAX_TRACE_RECORDS + 1):
        recorder.add(ns, Phase.WAIT)
    assert len(recorder.take()) == MAX_TRACE_RECORDS * TRACE_RECORD_BYTES


def test_time_beside_a_device_is_counted_by_itself() -> None:
    now = 0

    def at(ns: int) -> Stopwatch:
        nonlocal now
        now = ns
        return watch

    watch = Stopwatch(lambda: now)
    recorder = Recorder()
    watch.record(recorder)
    at(1_000).device_ends_in(1.0)  # no device is at work
    at(2_000).enter(Phase.MODEL)
    at(3_000).device_begins()
    at(5_000).enter(Phase.DECIDE)
    at(6_000).device_ends_in(4e-6)
    at(8_000).enter(Phase.SEND)
    at(13_000).enter(Phase.WAIT)  # the device ended at 10 us
    at(14_000).device_ended()  # that is known
    at(20_000).enter(Phase.MODEL)
    at(21_000).device_begins()
    at(25_000).device_begins()  # nobody has said that the first forward ended
    at(30_000).device_ended()
    at(32_000).enter(Phase.WAIT)
    exposed = {Phase.WAIT: 2 + 7, Phase.MODEL: 1 + 1 + 2, Phase.SEND: 3}
    beside = {Phase.MODEL: 2 + 9, Phase.DECIDE: 3, Phase.SEND: 2}
    assert watch.totals_us == tuple(exposed.get(phase, 0) for phase in Phase)
    assert watch.beside_us == tuple(beside.get(phase, 0) for phase in Phase)
    assert sum(watch.totals_us) + sum(watch.beside_us) == 32
    marks = [one for one in records_of(recorder.take()) if one.mark in list(Mark)]
    assert [(one.mark, one.ns) for one in marks] == [
        (Mark.LAUNCHED, 3_000),
        (Mark.ENDED, 10_000),
        (Mark.LAUNCHED, 21_000),
        (Mark.ENDED, 25_000),
        (Mark.LAUNCHED, 25_000),
        (Mark.ENDED, 30_000),
    ]
