"""Decides whether a peer has gone silent. Pure: time comes in as seconds of any monotonic clock."""

HEARTBEAT_INTERVAL_S = 0.25
SILENCE_LIMIT_S = 5.0
MAX_BAD_FRAMES = 8  # garbled frames that are tolerated from one peer
# A forward pass is waited for so many times as long as its node expects of it, and never less than
# the minimum. What a node expects counts up to a limit, so that every wait ends.
OVERRUN, OVERRUN_S_MIN, EXPECTED_S_MAX = 10.0, 60.0, 360.0


def pass_limit_s(expected_s: float) -> float:
    """Return for how many seconds a forward pass is waited for.

    expected_s  how long its node expects it to take; 0: it does not know
    """
    return max(OVERRUN_S_MIN, OVERRUN * min(expected_s, EXPECTED_S_MAX))


class FaultDetector:
    """Watches one peer and reports it lost after too long a silence; any message is a sign of life.

    Liveness is not progress: a node in the middle of a long prefill is alive, and its heartbeats
    show it. Whoever waits for unfinished work sets a limit of its own.
    """

    def __init__(self, now: float, silence_limit_s: float = SILENCE_LIMIT_S) -> None:
        self.silence_limit_s = silence_limit_s
        self._last_heard = now  # seconds; never later than a `now` that was passed in

    def heard(self, now: float) -> None:
        """Note that a message of any kind came from the peer at `now` (seconds)."""
        self._last_heard = max(self._last_heard, now)

    def silence_s(self, now: float) -> float:
        """Return the seconds since the last sign of life."""
        return now - self._last_heard

    def is_lost(self, now: float) -> bool:
        """True if the peer has been silent for longer than the limit."""
        return self.silence_s(now) > self.silence_limit_s
