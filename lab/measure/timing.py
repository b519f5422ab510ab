"""Functions that time work on a device, for the GPU kit.

On a GPU a call returns before its work is done, so whoever times it waits for the device.
"""

import gc
import time
from collections.abc import Callable
from statistics import median

import torch

Run = Callable[[], object]


WARM = 3


def wait(device: torch.device) -> None:
    """Wait until a device has done all work that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Run, device: torch.device) -> float:
    """Return the seconds until the run and the device are done."""
    wait(device)
    started = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - started


def typical(run: Run, device: torch.device, *, count: int) -> float:
    """Return the median seconds of `count` runs, after WARM runs that are not counted."""
    return median([seconds(run, device) for _ in range(WARM + count)][WARM:])


def free_memory() -> None:
    """Free memory that is garbage, so that node processes and the next model find room."""
    gc.collect()
    torch.cuda.empty_cache()
