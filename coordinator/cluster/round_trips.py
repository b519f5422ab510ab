"""Measures how long a message to a node and its answer take (pure).

The coordinator's heartbeats carry the time of its clock. A node's heartbeat returns the latest of
these times, and for how long it has had it; the rest of the elapsed time was spent on the link. A
node reads its messages between two forward passes, so an answer may be late by one pass; the
smallest of several times is that of the link alone.
"""

from collections import deque

NUM_LATEST = 16  # four seconds of heartbeats
SLOWER, SLOWER_BY_S = 3.0, 0.01  # a link is slower if it takes 3 times as long and 10 ms more


class RoundTrips:
    """The round-trip times of the link to one node."""

    def __init__(self) -> None:
        self.at_start_s: float | None = None
        self._latest: deque[float] = deque(maxlen=NUM_LATEST)
        self._stamp_us = 0
        self._is_slower = False

    @property
    def now_s(self) -> float | None:
        """Return the smallest of the latest round-trip times, seconds; None before the first."""
        return min(self._latest, default=None)

    @property
    def words(self) -> str:
        """Return the round-trip times for people: now, and at the start."""
        return f"{(self.now_s or 0) * 1e3:.1f} ms, at the start {(self.at_start_s or 0) * 1e3:.1f}"

    def add(self, stamp_us: int, held_us: int, now: float) -> bool:
        """Add an answer that came at `now`. True if the link has just become slower."""
        if stamp_us == self._stamp_us:
            return False  # an old stamp, or of a node that has had no heartbeat yet
        self._stamp_us = stamp_us
        self._latest.append(max(0.0, now - (stamp_us + held_us) / 1e6))
        least = min(self._latest)
        self.at_start_s = least if self.at_start_s is None else min(self.at_start_s, least)
        was_slower = self._is_slower
        limit = max(SLOWER * self.at_start_s, self.at_start_s + SLOWER_BY_S)
        self._is_slower = len(self._latest) == NUM_LATEST and least > limit
        return self._is_slower and not was_slower
