"""When a follower counts as stopped, in virtual time."""

from engine.tensor_parallel.silence import BEAT_S, LIMIT_S, Silence


def test_whoever_says_nothing_is_silent_for_as_long_as_somebody_watches() -> None:
    silence = Silence(100.0)
    for number in range(1, round(LIMIT_S / BEAT_S) + 1):
        silence.passes(100.0 + number * BEAT_S)
    assert silence.seconds == LIMIT_S


def test_a_beat_is_a_sign_of_life() -> None:
    silence = Silence(0.0)
    silence.passes(0.8)
    silence.heard()
    silence.passes(1.0)
    assert round(silence.seconds, 6) == 0.2


def test_the_time_in_which_the_watcher_was_stopped_itself_does_not_count() -> None:
    silence = Silence(0.0)
    silence.passes(0.5)
    silence.passes(3600.0)
    assert silence.seconds <= 0.5 + 2 * BEAT_S
