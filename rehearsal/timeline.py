"""Virtual time."""

import heapq
from collections.abc import Callable


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
