"""Functions that time work on a device, for all measurements here.

On a GPU a call returns before its work is done, so whoever times it waits for the device. On a CPU
`in_turns` uses the CPU time of the thread, so that other processes matter as little as possible.
"""

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles

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


def in_a_graph(run: Run, device: torch.device, *, calls: int, count: int) -> float:
    """Return the seconds of one run in a CUDA graph of `calls` runs: device time, no host time.

    Raises RuntimeError: it cannot be captured.
    """
    usual = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(usual)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                run()
        wait(device)
        # On the same stream, because another one would allocate a workspace of its own.
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                run()
    finally:
        torch.cuda.set_stream(usual)  # after an error the capture's stream would stay current
    return typical(graph.replay, device, count=count) / calls


def in_turns(
    runs: Sequence[Run], device: torch.device, *, warm: int, count: int
) -> list[list[float]]:
    """Return the seconds of each run; runs take turns, so that a slow moment affects all of them.

    Each run must return only when its work is done.

    warm   turns at the start that are not counted
    count  turns that are counted
    """
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    taken: list[list[float]] = [[] for _ in runs]
    for turn in range(warm + count):
        for run, times in zip(runs, taken, strict=True):
            started = clock()
            run()
            if turn >= warm:
                times.append(clock() - started)
    return taken


def spread(seconds: Sequence[float]) -> str:
    """Return the median of the times, in milliseconds, with its quartiles, as text."""
    low, mid, high = (1e3 * each for each in quantiles(seconds, n=4))
    return f"{mid:7.3f} [{low:.3f}, {high:.3f}]"


def free_memory() -> None:
    """Free memory that is garbage, so that node processes and the next model find room."""
    gc.collect()
    torch.cuda.empty_cache()
