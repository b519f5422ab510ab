"""One simulated device that the processes of both models share, in one of two ways.

    turns  what is launched first runs first, alone (a GPU without MPS, or one that is full)
    both   both run at once, and a pass takes `STRETCH` times as long while the drafter computes
           (a GPU with MPS, whose memory both read)

The processes see each other through a file of two numbers: until when the target and the drafter
have kept the device busy, by `time.perf_counter`, which on Linux is one clock for all processes.
"""

import fcntl
import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from node.forwards import SimulatedDevice
from proto.messages import Role
from proto.node_config import NodeConfig

Sharing = Literal["", "turns", "both"]
STRETCH = 1.15
# In the folder that both nodes are given as their model: the way, and the two numbers.
WAY, FILE = "sharing", "device"
_ROLES = tuple(Role)
_TIMES = struct.Struct(f"<{len(_ROLES)}d")


class SharedDevice(SimulatedDevice):
    """A simulated device on which the other model computes, too.

    path  of the file that both processes map
    """

    def __init__(
        self, forward_s: float, row_s: float, *, path: Path, role: Role, sharing: Sharing
    ) -> None:
        super().__init__(forward_s, row_s)
        self._index, self._sharing = _ROLES.index(role), sharing
        with path.open("ab") as file:
            if not file.tell():
                file.write(bytes(_TIMES.size))
        self._file: BinaryIO = path.open("r+b")
        self._times = mmap.mmap(self._file.fileno(), _TIMES.size)

    def end_of(self, started: float, num_rows: int) -> tuple[float, float]:
        """Return when a forward that was launched at `started` ends; it is never late."""
        with self._alone() as busy_until:
            other = max(until for index, until in enumerate(busy_until) if index != self._index)
            cost_s = self.forward_s(num_rows)
            if self._sharing == "turns":
                started = max(started, other)
            elif _ROLES[self._index] is Role.TARGET and other > started:
                cost_s += (1 - 1 / STRETCH) * min(STRETCH * cost_s, other - started)
            busy_until[self._index] = started + cost_s
            return busy_until[self._index], 0.0

    def late_s(self, end: float, num_rows: int) -> float:
        """Return 0: when a forward ends depends on the other model."""
        del end, num_rows
        return 0.0

    @contextmanager
    def _alone(self) -> Iterator[list[float]]:
        """Yield until when each role keeps the device busy; changes are written at the end."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            times = list(_TIMES.unpack(self._times))
            yield times
            self._times[:] = _TIMES.pack(*times)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def sharing_in(folder: Path) -> Sharing:
    """Return how the pair whose models lie in this folder shares its device."""
    said: Any = (folder / WAY).read_text()
    way: Sharing = said
    return way


def maker_of(sharing: Sharing) -> Callable[[NodeConfig], SimulatedDevice]:
    """Return what makes a node's simulated device."""

    def make(config: NodeConfig) -> SimulatedDevice:
        return SharedDevice(
            config.simulated_ms / 1e3,
            config.simulated_ms_per_row / 1e3,
            path=Path(config.model) / FILE,
            role=config.role,
            sharing=sharing,
        )

    return make if sharing else SimulatedDevice.of
