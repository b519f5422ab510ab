"""How long a message takes to a node and its answer back (pure).

The coordinator's heartbeats carry its clock, and a node's the latest that has come and how long it
has lain there: what is left is the way. A node reads its messages between two forwards, so one
answer may be a forward late; the least of some is the way itself.
"""

from collections import deque

NUM_LATEST = 16  # four seconds of heartbeats
SLOWER, SLOWER_BY_S = 3.0, 0.01  # what counts as slower: so many times as long, and by so much


class RoundTrips:
    """Of one node."""

    def __init__(self) -> None:
        self.at_start_s: float | None = None
        self._latest: deque[float] = deque(maxlen=NUM_LATEST)
        self._stamp_us = 0
        self._is_slower = False

    @property
    def now_s(self) -> float | None:
        """Seconds there and back; None before the first answer."""
        return min(self._latest, default=None)

    @property
    def words(self) -> str:
        """For people: now, and at the start."""
        return f"{(self.now_s or 0) * 1e3:.1f} ms, at the start {(self.at_start_s or 0) * 1e3:.1f}"

    def add(self, stamp_us: int, held_us: int, now: float) -> bool:
        """An answer has come, at `now` of the clock of its stamp. True: the link has got slower."""
        if stamp_us == self._stamp_us:
            return False  # an old one, or of a node that has heard nothing yet
        self._stamp_us = stamp_us
        self._latest.append(max(0.0, now - (stamp_us + held_us) / 1e6))
        least = min(self._latest)
        self.at_start_s = least if self.at_start_s is None else min(self.at_start_s, least)
        was_slower = self._is_slower
        limit = max(SLOWER * self.at_start_s, self.at_start_s + SLOWER_BY_S)
        self._is_slower = len(self._latest) == NUM_LATEST and least > limit
        return self._is_slower and not was_slower
