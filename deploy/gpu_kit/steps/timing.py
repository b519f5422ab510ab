"""How long a device takes: wall time to the end of its work, and kernels alone in a graph."""

import time
from collections.abc import Callable
from statistics import median

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
