"""Records become phases, forwards and notes; where some are missing, it shows."""

from coordinator.tracing.spans import Forward, Note, Span, Track, pieces_of, track_of
from proto.messages import TracePart
from proto.stopwatch import Mark, Phase, Record, Recorder


def record(ns: int, mark: int, extra: int = 0, detail: int = 0) -> Record:
    return Record(ns, mark, 3 if mark in (Mark.RECEIVED, Mark.SENT) else 0, extra, detail)


def packed(number: int, *times: int, num_dropped: int = 0) -> TracePart:
    """A part with the switches to DECIDE and WAIT, in turn, at these times."""
    recorder = Recorder()
    for index, ns in enumerate(times):
        recorder.add(ns, (Phase.DECIDE, Phase.WAIT)[index % 2])
    return TracePart(number, num_dropped, recorder.take())


def times_of(parts: list[TracePart]) -> tuple[list[list[int]], int]:
    pieces, num_missing = pieces_of(parts)
    return [[one.ns for one in piece] for piece in pieces], num_missing


def test_phases_forwards_and_notes_are_told_apart() -> None:
    piece = [
        record(10, Phase.WAIT),
        record(20, Phase.DECODE),
        record(21, Mark.RECEIVED, detail=77),
        record(30, Phase.PREPARE),
        record(31, Mark.FORWARD, extra=4, detail=9),
        record(40, Phase.MODEL),
        record(50, Phase.CHOOSE),
        record(60, Phase.PREPARE),  # one step follows the other at once
        record(61, Mark.FORWARD, extra=1, detail=1),
        record(70, Phase.CHOOSE),
        record(80, Phase.SEND),
        record(85, Mark.SENT, detail=78),
        record(90, Phase.WAIT),
        record(99, 200),  # nobody knows what that is
    ]
    assert track_of([piece], 0, lambda ns: ns) == Track(
        spans=[
            Span(20, 30, Phase.DECODE),
            Span(30, 40, Phase.PREPARE),
            Span(40, 50, Phase.MODEL),
            Span(50, 60, Phase.CHOOSE),
            Span(60, 70, Phase.PREPARE),
            Span(70, 80, Phase.CHOOSE),
            Span(80, 90, Phase.SEND),
        ],
        forwards=[Forward(30, 60, 9, 4), Forward(60, 80, 1, 1)],
        notes=[Note(21, False, 3, 77), Note(85, True, 3, 78)],
        recorded=[(10, 99)],
    )


def test_a_forward_on_a_device_lasts_from_its_launch_to_its_end() -> None:
    piece = [
        record(10, Phase.WAIT),
        record(15, Mark.ENDED),  # of what began before
        record(20, Phase.PREPARE),
        record(21, Mark.FORWARD, extra=4, detail=9),
        record(30, Phase.MODEL),
        record(31, Mark.LAUNCHED),
        record(40, Phase.DECIDE),
        record(50, Phase.WAIT),
        record(60, Mark.ENDED),
        record(62, Phase.DECIDE),
        record(70, Phase.PREPARE),
        record(71, Mark.FORWARD, extra=1, detail=1),
        record(80, Phase.MODEL),
        record(80, Mark.LAUNCHED),
        record(90, Phase.SEND),
        record(99, Phase.WAIT),
    ]
    track = track_of([piece], 0, lambda ns: ns)
    assert track.forwards == [
        Forward(31, 60, 9, 4, on_device=True),
        Forward(80, 99, 1, 1, on_device=True),  # no more is known
    ]
    assert [(one.start_ns, one.end_ns) for one in track.spans][:3] == [(20, 30), (30, 40), (40, 50)]


def test_what_was_before_is_cut_off_and_clocks_are_turned() -> None:
    piece = [record(10, Phase.DECIDE), record(15, Mark.SENT), record(30, Phase.WAIT)]
    track = track_of(
        [piece, [record(50, Phase.SEND), record(60, Phase.WAIT)]], 120, lambda n: n + 100
    )
    assert track.spans == [Span(120, 130, Phase.DECIDE), Span(150, 160, Phase.SEND)]
    assert track.recorded == [(120, 130), (150, 160)]
    assert track.notes == []


def test_a_lost_part_divides_what_is_known() -> None:
    assert times_of([packed(1, 1, 2), packed(2, 3, 4)]) == ([[1, 2, 3, 4]], 0)
    assert times_of([packed(2, 3, 4), packed(1, 1, 2)]) == ([[1, 2, 3, 4]], 0)
    assert times_of([packed(1, 1, 2), packed(4, 3, 4)]) == ([[1, 2], [3, 4]], 2)
    assert times_of([packed(7, 1, 2)]) == ([[1, 2]], 0)  # those before were taken before
    assert times_of([]) == ([], 0)


def test_records_that_were_dropped_are_missing_behind_their_part() -> None:
    parts = [packed(1, 1, 2), packed(2, 3, 4, num_dropped=5), packed(3, 9, num_dropped=5)]
    assert times_of(parts) == ([[1, 2, 3, 4], [9]], 0)
