"""In which number type a model takes least time here: timed, for it depends on size and processor.

A model of a few million weights is all overhead, and float32 has the leaner kernels; a large one is
all memory, and half the bytes take half the time. Only for a drafter: its numbers decide how often
it is right, never what the text is.
"""

import gc
import math
import time
from collections.abc import Callable

import torch

from engine.executor import Executor
from engine.model import LoadedModel, load_model
from engine.slots import NUM_TREE_SLOTS, Feed

FASTEST = "fastest"
MAX_PARAMETERS = 1_500_000_000  # larger ones stay as the checkpoint has them: memory decides

_CONTEXT = 64
_WARM, _TIMED = 5, 30

MakeExecutor = Callable[[LoadedModel, int], Executor]


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


def _seconds_of_a_row(executor: Executor) -> float:
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
