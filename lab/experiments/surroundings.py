"""What an experiment ran on: machine, versions, commit, and what others did meanwhile."""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from proto.installation import IS_CHECKOUT, ROOT

PACKAGES = ("torch", "transformers", "pyzmq", "ray", "numpy", "llama-cpp-python", "vllm")
GIT_LIMIT_S, GPU_LIMIT_S = 5.0, 10.0
QUIET, QUIET_LIMIT_S, SAMPLE_S = 0.1, 30.0, 0.5  # cores that others use; how long to wait for it


def machine() -> str:
    """The hardware and the system, in one line."""
    lines = _read("/proc/cpuinfo").splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    gpus = _said(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], GPU_LIMIT_S)
    parts = [f"{len(os.sched_getaffinity(0))} cores of {models[0] if models else 'unknown kind'}"]
    parts += gpus.splitlines()
    parts.append(f"{platform.system()} {platform.release()}")
    return ", ".join(parts)


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the code, with a mark if files differ from it; empty: not known.

    What was installed may lie in somebody else's repository, whose commit says nothing.
    """
    if not IS_CHECKOUT:
        return ""
    name = _said(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], GIT_LIMIT_S)
    changed = _said(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"], GIT_LIMIT_S)
    return f"{name} with changes" if changed else name


def wait_for_quiet(say: Callable[[str], None]) -> float:
    """Wait until others leave the cores alone, or half a minute; returns what they use (cores).

    say  is told if there is anything to wait for
    """
    deadline = time.monotonic() + QUIET_LIMIT_S
    has_said = False
    while True:
        load = Load()
        time.sleep(SAMPLE_S)
        cores = load.cores()
        if cores < QUIET or time.monotonic() > deadline:
            return cores
        if not has_said:
            say(f"others use {cores:.1f} cores; waiting up to {QUIET_LIMIT_S:.0f} s for quiet")
            has_said = True


class Load:
    """What other processes than ours and those that it started use, from now on."""

    def __init__(self) -> None:
        self._busy_s, self._own, self._since = _busy_s(), _own_s(), time.monotonic()

    def cores(self) -> float:
        """In cores, since the beginning."""
        own = _own_s()
        # A process that has ended in between is counted with others.
        own_s = sum(spent - self._own.get(pid, 0.0) for pid, spent in own.items())
        elapsed_s = time.monotonic() - self._since
        return max(0.0, _busy_s() - self._busy_s - own_s) / max(elapsed_s, 1e-3)


def _busy_s() -> float:
    """CPU seconds that this machine has been at work so far, for anybody."""
    fields = [int(field) for field in _read("/proc/stat").split("\n", 1)[0].split()[1:8]]
    user, nice, system, _idle, _iowait, irq, softirq = fields
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_s() -> dict[int, float]:
    """CPU seconds by process: ours and its descendants."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        # The name of the program may have spaces and brackets in it.
        fields = _read(f"/proc/{entry.name}/stat").rpartition(")")[2].split()
        if len(fields) < 13:
            continue  # it has just ended
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        spent[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own and pid not in own}:
        own |= more
    return {pid: spent[pid] for pid in own if pid in spent}


def _read(path: str) -> str:
    """A file of the system; empty where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _said(command: list[str], limit_s: float) -> str:
    """What a program prints; empty if it fails."""
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return made.stdout.strip() if made.returncode == 0 else ""
