"""Read the names of several ranks' devices: `cuda:0-3`, `cuda:0,cuda:1`, `cpu:0,cpu:1`.

Each GPU is a rank. CPU cores named together (`cpu:0-3`, `cpu:0,1`) are one rank, unless a number of
ranks is given that divides them.
"""

import os
import re
from collections.abc import Sequence

from engine.device import cores_of, torch_device
from engine.errors import ModelError
from engine.tensor_parallel.layout import shares

_GPUS = re.compile(r"cuda:(?P<runs>\d{1,4}(?:-\d{1,4})?(?:,\d{1,4}(?:-\d{1,4})?)*)")


def rank_devices(name: str, num_ranks: int = 1) -> tuple[str, ...]:
    """Return the name of each rank's device; a single device means one rank.

    num_ranks  number of ranks that is wanted; 1: as many as `name` names

    Raises:
        ModelError: the name is misspelt, devices are missing, or their number is not `num_ranks`.
    """
    devices = [one for part in re.split(r",(?=[a-z])", name) for one in _each(name, part)]
    if len(devices) == 1 and num_ranks > 1:
        devices = _divided(devices[0], num_ranks)
    if num_ranks not in (1, len(devices)):
        raise ModelError(
            f"device {name} is {len(devices)} ranks, but {num_ranks} are asked for "
            "(tensor_parallel_size); name as many, or leave one out"
        )
    if len(devices) == 1:
        return tuple(devices)
    kinds = {torch_device(device).type for device in devices}
    if len(kinds) > 1:
        raise ModelError(f"device {name}: the ranks of a model are all GPUs or all CPUs")
    if kinds == {"cuda"} and len(set(devices)) < len(devices):
        raise ModelError(f"device {name}: each rank needs a GPU of its own")
    return tuple(devices)


def _each(name: str, part: str) -> list[str]:
    """Return the device names that one part of a name stands for (`cuda:0-1`: two)."""
    match = _GPUS.fullmatch(part)
    if match is None:
        return [part]
    devices: list[str] = []
    for run in match["runs"].split(","):
        first, _, last = run.partition("-")
        if int(last or first) < int(first):
            raise ModelError(f"device {name}: {run} is no range of GPUs; the lower number first")
        devices += (f"cuda:{gpu}" for gpu in range(int(first), int(last or first) + 1))
    return devices


def _divided(device: str, num_ranks: int) -> list[str]:
    """Return the devices of `num_ranks` ranks: GPUs from `device` on, or shares of its CPU cores.

    Raises:
        ModelError: there are fewer cores than ranks.
    """
    if torch_device(device).type == "cuda":
        first = int(device.partition(":")[2])
        return [f"cuda:{first + rank}" for rank in range(num_ranks)]
    cores = sorted(cores_of(device) or os.sched_getaffinity(0))
    if len(cores) < num_ranks:
        raise ModelError(
            f"device {device}: {len(cores)} cores are too few for {num_ranks} ranks; lower "
            "tensor_parallel_size"
        )
    runs = shares(len(cores), num_ranks)
    return [f"cpu:{_spelt(cores[run.start : run.stop])}" for run in runs]


def _spelt(cores: Sequence[int]) -> str:
    """Return ascending core numbers as text: `0-3` if consecutive, else `0,2`."""
    if cores[-1] - cores[0] == len(cores) - 1 > 0:
        return f"{cores[0]}-{cores[-1]}"
    return ",".join(map(str, cores))
