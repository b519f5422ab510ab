"""Has a peer gone silent? Pure: time comes in as seconds of any monotonic clock."""

HEARTBEAT_INTERVAL_S = 0.25
SILENCE_LIMIT_S = 5.0
MAX_BAD_FRAMES = 8  # garbled ones that are taken from one peer


class FaultDetector:
    """One limit on silence. Any message counts as a sign of life.

    Liveness is not progress: a node in the middle of a long prefill is alive and its heartbeats say
    so. Unfinished work has a limit of its own, at whoever waits for it.
    """

    def __init__(self, now: float, silence_limit_s: float = SILENCE_LIMIT_S) -> None:
        self.silence_limit_s = silence_limit_s
        self._last_heard = now  # never in the future of any `now` passed in

    def heard(self, now: float) -> None:
        """Anything at all has come from the peer."""
        self._last_heard = max(self._last_heard, now)

    def silence_s(self, now: float) -> float:
        """Seconds since the last sign of life."""
        return now - self._last_heard

    def is_lost(self, now: float) -> bool:
        """Whether the peer has been silent for longer than the limit."""
        return self.silence_s(now) > self.silence_limit_s
