"""Virtual time, and repeatable random numbers."""

import heapq
from collections.abc import Callable
from typing import Protocol

# -- timeline --------------------------------------------------------------------------------------


class Timeline:
    """A queue of events in virtual time (seconds).

    Equal times keep the order of their scheduling.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_asked = 0

    def at(self, time: float, happen: Callable[[], None]) -> None:
        """Call `happen` at `time` (at once, if that has passed), when the timeline gets there."""
        self._num_asked += 1
        heapq.heappush(self._events, (max(time, self.now), self._num_asked, happen))

    def step(self) -> None:
        """Advance to the next event, and call it."""
        self.now, _, happen = heapq.heappop(self._events)
        happen()


# -- luck ------------------------------------------------------------------------------------------

# Pseudo-random numbers, determined by a seed.

BITS_64 = (1 << 64) - 1


class Luck(Protocol):
    """A source of random numbers; `random.Random` is one."""

    def random(self) -> float:
        """Return a random float in [0, 1)."""

    def randbytes(self, n: int, /) -> bytes:
        """Return `n` random bytes, and advance the source of random numbers."""


class Mixed:
    """Pseudo-random numbers made by hashing a counter; the same in every run."""

    def __init__(self, seed: int) -> None:
        self._state = mix(seed + 1)

    def random(self) -> float:
        """Return the next pseudo-random float in [0, 1)."""
        return (self._word() >> 11) / (1 << 53)

    def randbytes(self, n: int, /) -> bytes:
        """Return the next `n` pseudo-random bytes."""
        words = b"".join(self._word().to_bytes(8, "little") for _ in range(-(-n // 8)))
        return words[:n]

    def _word(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & BITS_64
        return mix(self._state)


def mix(value: int) -> int:
    """Return a hash of 64 bits of `value` (the finalizer of MurmurHash3)."""
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & BITS_64
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & BITS_64
    return value ^ value >> 33
