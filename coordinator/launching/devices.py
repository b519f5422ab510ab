"""Where the two models run if nobody says: GPUs first, else the cores shared out."""

import math
import os
import re
from collections.abc import Sequence, Set
from importlib.metadata import version
from pathlib import Path

from proto.messages import Role


def chosen_devices(target: str, drafter: str) -> tuple[str, str]:
    """Devices of target and drafter, where "" stands for the default."""
    defaults = default_devices()
    return target or defaults[0], drafter or defaults[1]


def default_device(role: Role, *, is_alone: bool) -> str:
    """The device of a node, which may have this machine for itself."""
    if not is_alone:
        return dict(zip((Role.TARGET, Role.DRAFTER), default_devices(), strict=True))[role]
    return "cuda:0" if _num_gpus() else "cpu"


def default_devices() -> tuple[str, str]:
    """Devices of target and drafter: a GPU each, or the one that there is.

    Without any the drafter gets a core, and the target all others.
    """
    if num_gpus := _num_gpus():
        return "cuda:0", f"cuda:{min(1, num_gpus - 1)}"
    allowed = os.sched_getaffinity(0)
    cores = [core for core in sorted(allowed) if _first_sibling(core, allowed) == core]
    if len(cores) == 1:
        cores = sorted(allowed)
    cores = cores[: max(2, _quota())]
    return f"cpu:{_as_runs(cores[:-1] or cores)}", f"cpu:{cores[-1]}"


def shares_gpu(device: str) -> bool:
    """Whether a node on this device has the only GPU of the machine, which others may want too."""
    return device.startswith("cuda") and _num_gpus() == 1


def is_device_here(name: str) -> bool:
    """Whether this machine has a device, as far as can be known without torch; "" is any."""
    kind, _, rest = name.partition(":")
    numbers = [int(number) for number in re.findall(r"\d+", rest)]
    if kind == "cuda":
        return max(numbers, default=0) < _num_gpus()
    return max(numbers, default=0) < (os.cpu_count() or 1)


def _quota() -> int:
    """How many cores' worth of time a container may take; a large number if nothing limits it."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # another version, or "max"
        return 1 << 16


def _first_sibling(core: int, allowed: Set[int]) -> int:
    """The lowest of the logical cores that share the arithmetic units of this one."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        runs = path.read_text().strip().split(",")
        siblings = {
            sibling
            for first, _, last in (run.partition("-") for run in runs)
            for sibling in range(int(first), int(last or first) + 1)
        }
    except (OSError, ValueError):
        return core
    return min(siblings & allowed, default=core)


def _as_runs(cores: Sequence[int]) -> str:
    """Spell ascending numbers as `0-3,6`."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)


def _num_gpus() -> int:
    """Those that torch can use, counted without it: the coordinator never loads it."""
    if version("torch").endswith("+cpu"):
        return 0
    there = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+|dxg", name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not there:
        return len(there)
    return len([name for name in visible.split(",") if re.match(r"\s*(\d|GPU-|MIG-)", name)])
