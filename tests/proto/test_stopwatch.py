"""Every moment of a loop belongs to one phase."""

from proto.stopwatch import Phase, Stopwatch


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
