"""Measures how many processor cores other programs use meanwhile, so that a figure can say so."""

import os
import time
from pathlib import Path

QUIET = 0.1  # cores that others may use before a figure is not that of this machine alone


class Load:
    """Measures the CPU load of other processes (not ours, nor our children) since its creation."""

    def __init__(self) -> None:
        self._busy_s, self._own, self._since = _busy_s(), _own_s(), time.monotonic()

    def cores(self) -> float:
        """Return how many CPU cores other processes used on average since the creation."""
        # What a process of ours had spent when it ended is in the figure of its parent.
        own_s = sum(_own_s().values()) - sum(self._own.values())
        elapsed_s = time.monotonic() - self._since
        return max(0.0, _busy_s() - self._busy_s - own_s) / max(elapsed_s, 1e-3)


def _busy_s() -> float:
    """Return the seconds that all cores of this machine together were busy since it started."""
    fields = [int(field) for field in _read("/proc/stat").split("\n", 1)[0].split()[1:8]]
    user, nice, system, _idle, _iowait, irq, softirq = fields
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


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
