"""A device that is played: a forward ends when it would have ended on the device that is meant.

The node computes with the model that it has, which must take less than that, and waits for the
rest. It sleeps through most of it, so that two such nodes on two cores leave each other alone, and
is awake shortly before the end, because no sleep ends in time.
"""

import time
from collections.abc import Callable, Mapping

from proto.node_config import NodeConfig

AWAKE_S = 0.0002
LATE_S, LATE_SHARE = 0.0002, 0.01  # so late an end, or by so much of the forward, is in time


class SimulatedDevice:
    """What a forward takes: so long, and so much more for each of its rows.

    clock, sleep  seconds
    """

    def __init__(
        self,
        forward_s: float,
        row_s: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._base_s, self._row_s = forward_s, row_s
        self._clock, self._sleep = clock, sleep

    @classmethod
    def of(cls, config: NodeConfig) -> "SimulatedDevice":
        """The device of a node."""
        return cls(config.simulated_ms / 1e3, config.simulated_ms_per_row / 1e3)

    @property
    def is_simulated(self) -> bool:
        """Whether there is any; else forwards take as long as they take here."""
        return self._base_s > 0 or self._row_s > 0

    def forward_s(self, num_rows: int) -> float:
        """Seconds of a forward of so many rows, the choice of its tokens included."""
        return self._base_s + num_rows * self._row_s

    def at_least(self, measured: Mapping[int, float]) -> dict[int, float]:
        """Seconds of forwards by their rows, where the model takes longer as it does."""
        return {rows: max(self.forward_s(rows), took) for rows, took in measured.items()}

    def await_end(self, started: float, num_rows: int) -> float:
        """Wait until a forward ends that began at `started`, by the clock.

        Returns by how many seconds it has overrun, 0 if it is in time: it was computed too slowly
        here, or others had the core when the sleep was over.
        """
        forward_s = self.forward_s(num_rows)
        end = started + forward_s
        left_s = end - self._clock()
        if left_s > AWAKE_S:
            self._sleep(left_s - AWAKE_S)
        while (now := self._clock()) < end:
            pass
        late_s = now - end
        return late_s if late_s > max(LATE_S, LATE_SHARE * forward_s) else 0.0
