"""How long something takes on a device: what every measurement here times with.

On a GPU a call returns before its work is done: whoever times it waits for the device. On a CPU
what takes turns is timed by the processor's clock of the thread, so that other processes count as
little as they can.
"""

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles

import torch

Run = Callable[[], object]


WARM = 3


def wait(device: torch.device) -> None:
    """Until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Run, device: torch.device) -> float:
    """How long it takes until the device is done."""
    wait(device)
    started = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - started


def typical(run: Run, device: torch.device, *, count: int) -> float:
    """Median seconds of a run, after some that do not count."""
    return median([seconds(run, device) for _ in range(WARM + count)][WARM:])


def in_a_graph(run: Run, device: torch.device, *, calls: int, count: int) -> float:
    """Seconds of one run among several in one CUDA graph: what the device takes, and no host.

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
        # On the same stream: another would hold a workspace of its own.
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                run()
    finally:
        torch.cuda.set_stream(usual)  # a capture that raises leaves the process on its own
    return typical(graph.replay, device, count=count) / calls


def in_turns(
    runs: Sequence[Run], device: torch.device, *, warm: int, count: int
) -> list[list[float]]:
    """Seconds of each run, which take turns, so that what slows the machine slows all of them.

    Each run ends by itself when its work is done.

    warm   turns at the start that do not count
    count  those that do
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
    """The median in milliseconds, and the quartiles."""
    low, mid, high = (1e3 * each for each in quantiles(seconds, n=4))
    return f"{mid:7.3f} [{low:.3f}, {high:.3f}]"


def free_memory() -> None:
    """Give back what is garbage, so that node processes and the next model find room."""
    gc.collect()
    torch.cuda.empty_cache()
