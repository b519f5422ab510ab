"""What this machine's processor can do, and how much memory it has; read without torch.

The coordinator asks it for its account of memory, the nodes through `device.py`.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS, GROUP_FILES = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Number type -> features of a CPU; without any of these the type is emulated, several times slower
# than float32.
CPU_FLAGS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def cpu_flags() -> set[str]:
    """Return this processor's feature names from /proc/cpuinfo; empty if there are none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def memory_bytes() -> int:
    """Return the memory of this machine, or what this process's control group may take of it."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([pages, *_group_limits()])


def _group_limits() -> Iterator[int]:
    """Yield the limits on memory of this process's control groups (containers, services)."""
    try:
        lines = GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, place = line.split(":", 2)
        is_new = kinds == ""
        if not is_new and "memory" not in kinds.split(","):
            continue
        folder = GROUP_FILES if is_new else GROUP_FILES / "memory"
        name = "memory.max" if is_new else "memory.limit_in_bytes"
        path = Path(place.lstrip("/"))
        for part in (path, *path.parents):
            with suppress(OSError, ValueError):  # the file of no limit says "max"
                yield int((folder / part / name).read_text())
