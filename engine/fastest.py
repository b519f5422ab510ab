"""How a model takes least time here: timed, for it depends on its size and the processor.

A model of a few million weights is all overhead, and float32 has the leaner kernels; a large one is
all memory, and half the bytes take half the time. The number type is chosen for a drafter alone:
its numbers decide how often it is right, never what the text is. And where a process has several
cores, a small model is faster on fewer, because threads wait for each other after every operator.
"""

import gc
import math
import time
from collections.abc import Callable

import torch

from engine.checkpoint.model import LoadedModel, load_model
from engine.executor import ModelExecutor
from engine.heads.loaded import Loaded
from engine.layout.slots import NUM_TREE_SLOTS, Feed

FASTEST = "fastest"
MAX_PARAMETERS = 1_500_000_000  # larger ones stay as the checkpoint has them: memory decides

_CONTEXT = 64
_WARM, _TIMED = 5, 30
_CLEARLY_LESS = 0.97
_STEADY_S = 0.2  # for one number of threads; quotas are by tenths of a second
_PARAMETERS_OF_A_THREAD = 50_000_000

MakeExecutor = Callable[[LoadedModel, int], ModelExecutor]


def fastest_dtype(
    model: str, *, revision: str | None, device: str, make_executor: MakeExecutor
) -> str:
    """Return the name of the type in which one row takes least time: the checkpoint's or float32.

    make_executor  (loaded, capacity) -> executor, as it will run

    The model is loaded once for each type that is timed, one after another.

    Raises:
        ModelError: it cannot be loaded.
    """
    if device.startswith("cuda"):
        return "auto"
    best, best_s = "auto", math.inf
    for name in ("auto", "float32"):
        loaded = load_model(model, revision=revision, dtype=name, device=device)
        if loaded.num_parameters > MAX_PARAMETERS:
            return "auto"
        if name == "auto" and loaded.dtype == torch.float32:
            return "auto"
        seconds = _seconds_of_a_row(make_executor(loaded, _CONTEXT + 1 + NUM_TREE_SLOTS))
        if seconds < best_s:
            best, best_s = name, seconds
        del loaded
        gc.collect()
    return best


def fastest_num_threads(loaded: LoadedModel) -> int:
    """Return with how many torch threads, up to those set, the model takes least time for a token.

    Timed on the model's own forward; of two that are alike the lower number. Leaves the number of
    threads as it was.
    """
    most = torch.get_num_threads()
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < most] + [most]
    token = torch.zeros(1, 1, dtype=torch.int64, device=loaded.device)
    best, best_s = most, math.inf
    try:
        for count in counts:
            torch.set_num_threads(count)
            seconds = _seconds_of_a_token(loaded, token)
            if seconds < best_s * _CLEARLY_LESS:
                best, best_s = count, seconds
    finally:
        torch.set_num_threads(most)
    return best


def usual_num_threads(loaded: Loaded) -> int:
    """The same without a clock: a thread for so many parameters, up to those that are set."""
    return min(torch.get_num_threads(), 1 + loaded.num_parameters // _PARAMETERS_OF_A_THREAD)


def _seconds_of_a_token(loaded: LoadedModel, token: torch.Tensor) -> float:
    """The mean of some time: where a quota holds a process back, the best of it would deceive."""
    with torch.inference_mode():
        loaded.model(token, use_cache=False)
        started = now = time.perf_counter()
        num_passes = 0
        while now - started < _STEADY_S:
            loaded.model(token, use_cache=False)
            now = time.perf_counter()
            num_passes += 1
    return (now - started) / num_passes


def _seconds_of_a_row(executor: ModelExecutor) -> float:
    """The best of some passes: whatever else the machine does only adds to them."""
    before = tuple(range(_CONTEXT))
    executor.run(Feed(before, before, before, 0, None), ())
    row = Feed((1,), (_CONTEXT,), (_CONTEXT,), _CONTEXT, (1,))
    best = math.inf
    for number in range(_WARM + _TIMED):
        started = time.perf_counter()
        executor.run(row, (0,))
        if number >= _WARM:
            best = min(best, time.perf_counter() - started)
    return best
