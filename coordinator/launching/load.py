"""Measures how many CPU cores other programs use on this machine."""

import os
import time
from pathlib import Path

NUM_FIELDS = 7  # user nice system idle iowait irq softirq
BUSY_CORES = 0.25  # used by others: above it times and ratios are not to be trusted


class Load:
    """Measures the CPU load of other processes (not ours, nor our children) since its creation.

    Counted are the cores that this process may use.
    """

    def __init__(self) -> None:
        self._busy_s, self._own, self._since = _busy_s(), _own_s(), time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the creation."""
        return time.monotonic() - self._since

    def cores(self) -> float:
        """Return how many CPU cores other processes used on average since the creation."""
        # What a process of ours had spent when it ended is in the figure of its parent.
        own_s = sum(_own_s().values()) - sum(self._own.values())
        return max(0.0, _busy_s() - self._busy_s - own_s) / max(self.elapsed_s, 1e-3)


def _busy_s() -> float:
    """Return the seconds that our cores together were busy since the machine started."""
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    cores = [line.split() for line in _read("/proc/stat").splitlines() if line.startswith("cpu")]
    # Where the cores are numbered in another way than their lines, all of them count.
    found = [fields for fields in cores if fields[0] in ours] or cores[:1]
    num_ticks = 0
    for fields in found:
        user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[1 : NUM_FIELDS + 1])
        num_ticks += user + nice + system + irq + softirq
    return num_ticks / os.sysconf("SC_CLK_TCK")


def _own_s() -> dict[int, float]:
    """Return the CPU seconds of this process and of each of its descendants, by process id.

    The seconds of children that have ended are in them.
    """
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        # The name of the program may have spaces and brackets in it.
        fields = _read(f"/proc/{entry.name}/stat").rpartition(")")[2].split()
        if len(fields) < 15:
            continue  # the process has just ended
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        spent[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own and pid not in own}:
        own |= more
    return {pid: spent[pid] for pid in own if pid in spent}


def _read(path: str) -> str:
    """Return the text of a file of the system; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
