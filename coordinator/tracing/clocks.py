"""The clock of another process, as told by messages there and back (pure).

The coordinator's heartbeat leaves at t0 of its own clock and comes at t1 of the node's; the node's
leaves at t2 of that clock and comes at t3. If both ways took the same time, the node's clock is
ahead by ((t1 - t0) - (t3 - t2)) / 2; whatever they took, it is that give or take half of the round
trip (t3 - t0) - (t2 - t1). So of some exchanges the one with the least round trip tells most (NTP,
RFC 5905). Clocks also drift: there is one such estimate for each ten seconds, and a line between.
All other messages say something as well: each comes after it was sent, so those to the node say how
far its clock is ahead at most, and those from it, at least.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

from proto.messages import Heartbeat

WINDOW_NS = 10_000_000_000
ROUNDING_NS = 1_000  # stamps are microseconds


@dataclass(frozen=True, slots=True)
class Exchange:
    """A heartbeat there and one back. Nanoseconds of our clock, and of theirs.

    sent_ns, came_ns   ours: when we sent, when the answer came
    heard_ns, said_ns  theirs: when ours came, when theirs was sent
    """

    sent_ns: int
    heard_ns: int
    said_ns: int
    came_ns: int

    @classmethod
    def of(cls, came_ns: int, beat: Heartbeat) -> Self:
        """What a node's heartbeat tells that came then; it has a stamp."""
        said_ns = beat.clock_us * 1000
        return cls(beat.stamp_us * 1000, said_ns - beat.held_us * 1000, said_ns, came_ns)

    @property
    def round_trip_ns(self) -> int:
        """On the way, both ways together."""
        return (self.came_ns - self.sent_ns) - (self.said_ns - self.heard_ns)

    @property
    def ahead_ns(self) -> int:
        """How far their clock is ahead of ours, by this exchange."""
        return (self.heard_ns - self.sent_ns + self.said_ns - self.came_ns) // 2

    @property
    def error_ns(self) -> int:
        """By how much that may be wrong."""
        return self.round_trip_ns // 2 + 2 * ROUNDING_NS


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock as seen from ours.

    knots     at a time of theirs, how far it is ahead; in the order of time, at least one
    error_ns  by how much that may be wrong; 0: it is the same clock
    """

    knots: tuple[tuple[int, int], ...] = ((0, 0),)
    error_ns: int = 0
    num_exchanges: int = 0

    @property
    def is_same(self) -> bool:
        """Whether it is our own clock."""
        return not self.error_ns

    @property
    def ahead_ns(self) -> int:
        """How far it was ahead at first."""
        return self.knots[0][1]

    def nearer(self, least_ns: int, most_ns: int) -> "Clock":
        """This clock, which is ahead by so much more than was thought, at least and at most, as no
        message comes before it was sent. Where that tells less, or what cannot be, as it is."""
        error_ns = (most_ns - least_ns) // 2 + ROUNDING_NS
        if self.is_same or least_ns > most_ns or error_ns >= self.error_ns:
            return self
        shift_ns = (least_ns + most_ns) // 2
        knots = tuple((ns, ahead_ns + shift_ns) for ns, ahead_ns in self.knots)
        return replace(self, knots=knots, error_ns=error_ns)

    def ours(self, theirs_ns: int) -> int:
        """A time of theirs on our clock."""
        after = bisect_right(self.knots, (theirs_ns, 0))
        if after in (0, len(self.knots)):
            return theirs_ns - self.knots[min(after, len(self.knots) - 1)][1]
        (start, low), (end, high) = self.knots[after - 1 : after + 1]
        return theirs_ns - low - (high - low) * (theirs_ns - start) // (end - start)


SAME = Clock()


def clock_of(exchanges: Iterable[Exchange], *, same_host: bool) -> Clock | None:
    """The clock of a node; None: nothing is known of it.

    same_host  it says that it runs on our host, where all processes have one clock; it is believed
               if the exchanges do not say otherwise
    """
    # One with a negative round trip was not an exchange.
    found = sorted((one for one in exchanges if one.round_trip_ns >= 0), key=lambda e: e.said_ns)
    best = [
        min(window, key=lambda e: e.round_trip_ns)
        for _, window in groupby(found, key=lambda e: e.said_ns // WINDOW_NS)
    ]
    if same_host and all(abs(one.ahead_ns) <= one.error_ns for one in best):
        return SAME
    if not best:
        return None
    knots = tuple((one.said_ns, one.ahead_ns) for one in best)
    return Clock(knots, max(one.error_ns for one in best), len(found))
