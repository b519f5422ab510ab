"""Virtual time."""

import heapq
from collections.abc import Callable
from typing import Protocol

# -- timeline --------------------------------------------------------------------------------------


class Timeline:
    """Events in virtual time; equal times in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_asked = 0

    def at(self, time: float, happen: Callable[[], None]) -> None:
        """Call `happen` at `time`."""
        self._num_asked += 1
        heapq.heappush(self._events, (max(time, self.now), self._num_asked, happen))

    def step(self) -> None:
        """Let the next event happen."""
        self.now, _, happen = heapq.heappop(self._events)
        happen()


# -- luck ------------------------------------------------------------------------------------------

# Numbers that look drawn at random, and are functions of a seed.

BITS_64 = (1 << 64) - 1


class Luck(Protocol):
    """What draws numbers; `random.Random` is one."""

    def random(self) -> float:
        """A number in [0, 1)."""

    def randbytes(self, n: int, /) -> bytes:
        """So many bytes."""


class Mixed:
    """The outputs of a good hash of a counter: every run is alike."""

    def __init__(self, seed: int) -> None:
        self._state = mix(seed + 1)

    def random(self) -> float:
        """See `Luck`."""
        return (self._word() >> 11) / (1 << 53)

    def randbytes(self, n: int, /) -> bytes:
        """See `Luck`."""
        words = b"".join(self._word().to_bytes(8, "little") for _ in range(-(-n // 8)))
        return words[:n]

    def _word(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & BITS_64
        return mix(self._state)


def mix(value: int) -> int:
    """A good hash of 64 bits (the finalizer of MurmurHash3)."""
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & BITS_64
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & BITS_64
    return value ^ value >> 33
