"""Which requests are in work, and whether one more may begin (pure).

Theory of operation
-------------------
A server is OPEN until it is told to end. Then it is DRAINING: the requests in work go on, and new
ones are refused. It has ENDED when none is left, or when the time for that is over: whatever is
still in work is broken off. Two signals, or the end of the pair, end it at once.

    refused(now)     why a new request must be refused now; None: it may begin
    begin() leave()  a request is in work, and is no more
    drain(...)       OPEN -> DRAINING, with a limit of time
    end(why)         OPEN, DRAINING -> ENDED
"""

import math
from enum import Enum, auto

RETRY_AFTER_S = 1


class Phase(Enum):
    """How far the end of a server has come."""

    OPEN = auto()
    DRAINING = auto()
    ENDED = auto()


class Work:
    """Counts the requests in work. Times are monotonic seconds.

    most  requests that may be in work at once
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num = 0  # requests in work
        self.phase = Phase.OPEN
        self.why = ""  # the server ends; empty while it is OPEN
        self._until = 0.0  # when draining ends

    @property
    def is_ending(self) -> bool:
        """True if no new request may begin any more."""
        return self.phase is not Phase.OPEN

    def begin(self) -> None:
        """Count a request in; `refused` must have let it pass."""
        assert self.num < self.most
        assert not self.is_ending
        self.num += 1

    def leave(self) -> None:
        """Count a request out: it was answered, or its client has gone."""
        assert self.num > 0
        self.num -= 1

    def refused(self) -> str | None:
        """Return why a new request must be refused now, in words for clients; None: it may pass."""
        if self.is_ending:
            return self.why
        if self.num >= self.most:
            return f"{self.most} requests are in work already; try again later"
        return None

    def retry_after_s(self, now: float) -> int:
        """Return after how many seconds a refused client should ask again, at least 1."""
        left_s = self._until - now if self.phase is Phase.DRAINING else 0.0
        return max(RETRY_AFTER_S, math.ceil(left_s))

    def drain(self, now: float, limit_s: float) -> None:
        """Let no new request begin; those in work have `limit_s` seconds."""
        if self.phase is Phase.OPEN:
            self.phase, self._until = Phase.DRAINING, now + limit_s
            self.why = "the server is ending; ask again later, or another one"

    def is_drained(self, now: float) -> bool:
        """True if the server drains, and nothing is left or the time is over."""
        return self.phase is Phase.DRAINING and (self.num == 0 or now >= self._until)

    def end(self, why: str) -> None:
        """Let no new request begin; those in work are broken off by the caller.

        why  in words for clients
        """
        self.phase, self.why = Phase.ENDED, why
