"""Chooses devices for both models if the user names none: GPUs, else a share of the CPU cores.

Without a GPU the drafter gets the last core, and the target the others; where the machine's memory
is divided (NUMA), the drafter gets a core of another node than the target. On which of the pair's
cores each pass runs is decided later, in the target's process (`node/placing.py`): `shared_device`
says which there are.
"""

import math
import os
import re
import subprocess
from collections.abc import Mapping, Sequence, Set
from importlib.metadata import version
from pathlib import Path

from proto.errors import ConfigurationError, shown
from proto.messages import Role

_RUNS = r"\d{1,4}(?:-\d{1,4})?(?:,\d{1,4}(?:-\d{1,4})?)*"
_DEVICE = re.compile(rf"cpu|(?P<kind>cpu|cuda):(?P<runs>{_RUNS})")
QUERY_LIMIT_S = 10.0
NUMA_NODES = Path("/sys/devices/system/node")  # node0, node1 ...: each with memory of its own
SPELT = "use cpu, cpu:N or cpu:N-M (these cores), cuda:N (GPU N) or cuda:N-M (a part on each)"


def num_ranks(device: str, size: int = 1) -> int:
    """Return how many processes share a model on `device` (one rank per GPU or CPU that it names).

    The rule that counts is in `engine.tensor_parallel.devices`.

    size  the number of ranks that is asked for; 1: as many as the device names
    """
    if size > 1:
        return size
    runs = [
        run.partition("-")
        for part in re.split(r",(?=[a-z])", device)
        for run in (part[5:].split(",") if part.startswith("cuda:") else ["0"])
    ]
    numbers = [(first, last or first) for first, _, last in runs]
    if not all(first.isdecimal() and last.isdecimal() for first, last in numbers):
        return 1  # a wrong name, which the node refuses
    return max(1, sum(int(last) - int(first) + 1 for first, last in numbers))


def check_device(role: Role, name: str, size: int = 1) -> None:
    """Raise ConfigurationError if no model can run on device `name`; checked without torch.

    name  the device as the user gave it; empty: the default, which always exists
    size  the number of ranks that is asked for; 1: as many as the name has
    """
    if not name:
        return
    parts = [_DEVICE.fullmatch(part) for part in re.split(r",(?=[a-z])", name)]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        raise ConfigurationError(f"unknown {role} device {shown(name)}: {SPELT}")
    kinds = {part["kind"] or "cpu" for part in found}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"{role} device {name}: the ranks of a model are all GPUs or all CPUs; name one kind"
        )
    numbers = [number for part in found for number in _numbers(role, name, part["runs"] or "")]
    if kinds == {"cuda"}:
        extra = size - 1 if len(numbers) == 1 else 0  # further GPUs after the first one
        _check_gpus(f"{role} device {name}", max(numbers) + extra)
    elif max(numbers, default=0) >= (count := os.cpu_count() or 1):
        raise ConfigurationError(
            f"{role} device {name}: there is no such core; those here are cpu:0 to cpu:{count - 1}"
        )
    if size not in (1, num_ranks(name)) and num_ranks(name) > 1:
        raise ConfigurationError(
            f"{role} device {name} is {num_ranks(name)} ranks, but {size} are asked for; name as "
            "many, or leave one of the two out"
        )


def _numbers(role: Role, name: str, runs: str) -> list[int]:
    """Return the numbers of the cores or GPUs in one part of a device name; empty means any."""
    found: list[int] = []
    for run in filter(None, runs.split(",")):
        first, _, last = run.partition("-")
        if int(last or first) < int(first):
            raise ConfigurationError(
                f"{role} device {name}: {run} is no range; the lower number first"
            )
        found += range(int(first), int(last or first) + 1)
    return found


def _check_gpus(what: str, highest: int) -> None:
    if "+rocm" in version("torch"):
        return  # AMD GPUs have other device files than those that `_num_gpus` counts
    count = _num_gpus()
    if not count:
        why = "no GPU is there"
        if version("torch").endswith("+cpu"):
            why = "the torch that is installed is one for CPUs alone"
        elif os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
            why = "CUDA_VISIBLE_DEVICES leaves none"
        raise ConfigurationError(f"{what}: there is no GPU to use ({why}); use cpu, or no device")
    if highest >= count:
        raise ConfigurationError(
            f"{what}: there is no GPU {highest}; those here are cuda:0 to cuda:{count - 1}"
        )


def shares(role: Role, device: str, number: int) -> list[str]:
    """Return the device of each of several nodes of a role, made of the one that the user named.

    Each node gets as many of its GPUs, cores or parts as every other, in their order; a single one,
    and `cpu`, is for all of them. Raises ConfigurationError if they do not come out even. A wrong
    name is returned as it is: `check_device` says what is wrong.
    """
    parts = re.split(r",(?=[a-z])", device)
    found = [_DEVICE.fullmatch(part) for part in parts]
    if number == 1 or not all(one is not None and one["runs"] for one in found):
        return [device] * number
    items, prefix = parts, ""
    if device.startswith("cuda") or len(parts) == 1:
        prefix = f"{device.partition(':')[0]}:"
        items = [str(one) for part in parts for one in _numbers(role, device, part[len(prefix) :])]
    size = len(items) // number
    if len(items) == 1:
        return [device] * number
    if len(items) % number:
        raise ConfigurationError(
            f"{role} device {device}: {len(items)} devices cannot be divided evenly among {number} "
            f"{role}s; name {number}, or one for all"
        )
    groups = [items[index * size : (index + 1) * size] for index in range(number)]
    if not prefix:
        return [",".join(group) for group in groups]
    return [prefix + _as_runs([int(one) for one in group]) for group in groups]


def default_shares(
    num_targets: int, num_drafters: int, target_size: int = 1, drafter_size: int = 1
) -> tuple[list[str], list[str]]:
    """Return the default devices of several targets and of the drafters beside them.

    Each has GPUs of its own while there are enough, the targets first. Without a GPU the drafters
    have the last cores, one for each of their ranks, and the targets divide the others evenly.
    Where there are too few, some have the same.
    """
    if num_gpus := _num_gpus():
        firsts = [index * target_size for index in range(num_targets)]
        others = num_targets * target_size
        seconds = [others + index * drafter_size for index in range(num_drafters)]
        targets = [first % max(1, num_gpus - target_size + 1) for first in firsts]
        drafters = [min(first, max(0, num_gpus - drafter_size)) for first in seconds]
        return [f"cuda:{one}" for one in targets], [f"cuda:{one}" for one in drafters]
    cores = _cores()
    num_last = max(1, min(num_drafters * drafter_size, len(cores) - num_targets))
    last = cores[-num_last:] if num_drafters else []
    others_left = cores[: len(cores) - len(last)] or cores
    return _divided(others_left, num_targets), _divided(last, num_drafters)


def _divided(cores: Sequence[int], number: int) -> list[str]:
    """Return the cores of each of several nodes, evenly; fewer than nodes: some share one."""
    size, more = divmod(len(cores), max(1, number))
    if not size:
        return [f"cpu:{cores[index % len(cores)]}" for index in range(number)]
    ends = [(index + 1) * size + min(index + 1, more) for index in range(number)]
    starts = [0, *ends]
    return [f"cpu:{_as_runs(cores[a:b])}" for a, b in zip(starts, ends, strict=False)]


def default_device(
    role: Role, *, is_alone: bool, size: int = 1, peer_size: int = 1, has_peer: bool = True
) -> str:
    """Return the device of a node for which the user named none.

    is_alone         no other node runs on this machine
    size, peer_size  number of ranks of this node's model and of the other node's
    has_peer         False: the pair has no other node
    """
    if is_alone:
        return "cuda:0" if _num_gpus() else "cpu"
    if not has_peer:
        return "cuda:0" if _num_gpus() else f"cpu:{_as_runs(_cores())}"
    if role is Role.TARGET:
        return default_devices(size, peer_size)[0]
    return default_devices(peer_size, size)[1]


def default_devices(target_size: int = 1, drafter_size: int = 1) -> tuple[str, str]:
    """Return the default devices of target and drafter: a GPU each, or the only one for both.

    For a model on several GPUs the first one is named.

    Without a GPU the drafter gets one CPU core for each of its ranks, and the target all others; of
    several NUMA nodes with enough cores, the drafter gets cores of the last and the target all of
    the first.
    """
    if num_gpus := _num_gpus():
        return "cuda:0", f"cuda:{max(0, min(target_size, num_gpus - drafter_size))}"
    cores = _cores()
    nodes = _by_numa_node(cores)
    if len(nodes) > 1 and len(nodes[0]) >= target_size and len(nodes[-1]) >= drafter_size:
        return f"cpu:{_as_runs(nodes[0])}", f"cpu:{_as_runs(nodes[-1][-drafter_size:])}"
    others = cores[:-drafter_size]
    if len(others) < target_size:
        others = cores
    return f"cpu:{_as_runs(others)}", f"cpu:{_as_runs(cores[-drafter_size:])}"


def shared_device() -> str:
    """Return the cores on which a target may also run that has the default device beside a drafter.

    These are all that the pair has. "": there is a GPU, or only one core, or the drafter's core
    belongs to another NUMA node.
    """
    cores = _cores()
    if _num_gpus() or len(cores) < 2 or len(_by_numa_node(cores)) > 1:
        return ""
    return f"cpu:{_as_runs(cores)}"


def _cores() -> list[int]:
    """Return the cores that a pair may use, ascending: one logical core of each physical core."""
    allowed = os.sched_getaffinity(0)
    cores = [core for core in sorted(allowed) if _first_sibling(core, allowed) == core]
    if len(cores) == 1:
        cores = sorted(allowed)
    return cores[: max(2, _quota())]


def _by_numa_node(cores: Sequence[int]) -> list[list[int]]:
    """Return the cores of each NUMA node, the node with the most cores first."""
    nodes: list[list[int]] = []
    for path in sorted(NUMA_NODES.glob("node[0-9]*/cpulist")):
        try:
            there = _from_runs(path.read_text())
        except (OSError, ValueError):
            return [list(cores)]
        if own := [core for core in cores if core in there]:
            nodes.append(own)
    return sorted(nodes, key=len, reverse=True) or [list(cores)]


def gpus_of(device: str, size: int = 1) -> frozenset[int]:
    """Return the numbers of the GPUs that a node with this device uses; empty on a CPU.

    size  number of ranks; if the device names one GPU, they use that one and those after it
    """
    if not device.startswith("cuda"):
        return frozenset()
    numbers: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", device):
        numbers += range(int(first), int(last or first) + 1)
    if len(numbers) == 1:
        numbers = list(range(numbers[0], numbers[0] + size))
    return frozenset(numbers)


def visible_gpus() -> list[str]:
    """Return the GPUs that torch can use, in its order: UUIDs where known, else names or numbers.

    CUDA_VISIBLE_DEVICES may name a GPU by number, by UUID, by the beginning of a UUID, or name a
    part of a GPU (a MIG instance).
    """
    uuids = _uuids()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [uuids.get(str(number), str(number)) for number in range(_num_gpus())]
    names = [name.strip() for name in visible.split(",")][: _num_gpus()]
    return [_full_name(name, uuids) for name in names]


def _full_name(name: str, uuids: Mapping[str, str]) -> str:
    if not name.startswith("GPU-"):
        return uuids.get(name, name)
    found = [uuid for uuid in uuids.values() if uuid.startswith(name)]
    return found[0] if len(found) == 1 else name


def gpu_memory(number: int) -> int | None:
    """Return the memory in bytes of a GPU that torch can use, by its number; None: not known."""
    visible = visible_gpus()
    name = visible[number] if number < len(visible) else None
    rows = _asked("uuid,index,memory.total")
    found = [memory for uuid, index, memory in rows if name in (uuid, index)]
    words = found[0].split() if found else []
    return int(words[0]) << 20 if words and words[0].isdecimal() else None


def _asked(fields: str) -> list[list[str]]:
    """Return a row of three fields for each GPU, as nvidia-smi says them; [] if it cannot."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[word.strip() for word in line.split(",", 2)] for line in ended.stdout.splitlines()]
    return [row for row in rows if len(row) == 3]


def _uuids() -> dict[str, str]:
    """Return the UUID of each GPU by its number in CUDA; empty if that is not certain."""
    rows = _asked("index,uuid,name")
    # nvidia-smi numbers GPUs by PCI bus. CUDA does so only if it is told to, or if all are alike.
    in_bus_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not in_bus_order and len({name for _, _, name in rows}) > 1:
        return {}
    return {index: uuid for index, uuid, _ in rows}


def is_device_here(name: str) -> bool:
    """True if this machine has the device (checked without torch); "" means any device."""
    kind, _, rest = name.partition(":")
    numbers = [int(number) for number in re.findall(r"\d+", rest)]
    if kind == "cuda":
        return max(numbers, default=0) < _num_gpus()
    return max(numbers, default=0) < (os.cpu_count() or 1)


def _quota() -> int:
    """Return how many CPUs' worth of time the container may use; 65536 if there is no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # another version of cgroups, or "max"
        return 1 << 16


def _first_sibling(core: int, allowed: Set[int]) -> int:
    """Return the lowest allowed logical core that shares a physical core with `core`."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        siblings = _from_runs(path.read_text())
    except (OSError, ValueError):
        return core
    return min(siblings & allowed, default=core)


def _from_runs(text: str) -> set[int]:
    """Return the numbers in text like `0-3,6`. Raises ValueError: it is no such text."""
    runs = (run.partition("-") for run in text.strip().split(",") if run)
    return {
        number for first, _, last in runs for number in range(int(first), int(last or first) + 1)
    }


def _as_runs(cores: Sequence[int]) -> str:
    """Return ascending numbers as text like `0-3,6`."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)


def _num_gpus() -> int:
    """Return the number of GPUs that torch can use, counted without torch.

    The coordinator never loads torch.
    """
    if version("torch").endswith("+cpu"):
        return 0
    there = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+|dxg", name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not there:
        return len(there)
    return len([name for name in visible.split(",") if re.match(r"\s*(\d|GPU-|MIG-)", name)])
