"""Choose the dtype and the number of threads that are fastest for a model here, by timing.

The best choice depends on the model's size and on the processor. In a model of a few million
weights overhead dominates, and float32 has the leaner kernels; in a large one memory traffic
dominates, and half the bytes take half the time. The dtype is chosen for a drafter only: its
precision changes how often its drafts are right, but never the text. Where a process has several
cores, a small model is faster on fewer, because threads wait for each other after every operator.
"""

import gc
import math
import time
from collections.abc import Callable
from functools import partial

import torch

from engine.checkpoint.model import LoadedModel
from engine.heads.loaded import Loaded
from engine.layout.slots import NUM_TREE_SLOTS, Feed
from engine.model_executor import ModelExecutor
from engine.timing import COMPARED_ROWS, Seconds, fewest_seconds, is_never_slower

FASTEST = "fastest"
MAX_PARAMETERS = 1_500_000_000  # larger models keep the checkpoint's dtype: memory traffic decides

_CONTEXT = 64
_WARM, _TIMED = 5, 30
_CLEARLY_LESS = 0.97
_STEADY_S = 0.2  # time each number of threads for so long; CPU quotas are per tenth of a second
_PARAMETERS_OF_A_THREAD = 50_000_000

MakeExecutor = Callable[[LoadedModel, int], ModelExecutor]
Load = Callable[..., LoadedModel]


def fastest_dtype(load: Load, *, device: str, make_executor: MakeExecutor) -> str:
    """Return the dtype in which passes are fastest: "auto" or "float32".

    "auto" is the checkpoint's own dtype. float32 is returned only if passes of one row are faster
    in it, and passes of no other number of rows are slower. "auto" is returned untimed on a GPU and
    for models of more than `MAX_PARAMETERS`. The model is loaded once for each dtype, one after
    another.

    load           loads the model: function (dtype=name) -> the model
    make_executor  function (loaded model, cache capacity) -> executor, built as it will run

    Raises:
        ModelError: the model cannot be loaded.
    """
    if device.startswith("cuda"):
        return "auto"
    taken: dict[str, Seconds] = {}
    for name in ("auto", "float32"):
        loaded = load(dtype=name)
        if loaded.num_parameters > MAX_PARAMETERS:
            return "auto"
        if name == "auto" and loaded.dtype == torch.float32:
            return "auto"
        taken[name] = _seconds_by_rows(make_executor(loaded, _CONTEXT + 1 + NUM_TREE_SLOTS))
        del loaded
        gc.collect()
    own, other = taken["auto"], taken["float32"]
    is_faster = other[1] < own[1] and is_never_slower(other, own)
    return "float32" if is_faster else "auto"


def fastest_num_threads(executor: ModelExecutor) -> int:
    """Return the number of torch threads, at most those now set, that is fastest for one token.

    Times whole passes of one row, as they will run; a higher number must be clearly faster than a
    lower one to be chosen. The number of threads that is set does not change. Overwrites the first
    slot, so call it before any text is opened.
    """
    most = torch.get_num_threads()
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < most] + [most]
    best, best_s = most, math.inf
    try:
        for count in counts:
            torch.set_num_threads(count)
            seconds = _steady_seconds(executor)
            if seconds < best_s * _CLEARLY_LESS:
                best, best_s = count, seconds
    finally:
        torch.set_num_threads(most)
    return best


def is_dtype(found: object) -> bool:
    """True for what `fastest_dtype` may return."""
    return found in ("auto", "float32")


def is_num_threads(most: int, found: object) -> bool:
    """True for what `fastest_num_threads` may return with `most` threads set."""
    return isinstance(found, int) and 1 <= found <= most


def usual_num_threads(loaded: Loaded) -> int:
    """Return a number of torch threads by the model's size, without timing.

    One, and one more for each 50 million parameters; at most those now set.
    """
    return min(torch.get_num_threads(), 1 + loaded.num_parameters // _PARAMETERS_OF_A_THREAD)


def _steady_seconds(executor: ModelExecutor) -> float:
    """Return the mean seconds of passes of one row, over `_STEADY_S` seconds.

    A mean and not `fewest_seconds`, because a CPU quota slows a process only now and then.
    """
    row = Feed.chain(0, 1)
    executor.run(row, (0,))
    started = now = time.perf_counter()
    num_passes = 0
    while now - started < _STEADY_S:
        executor.run(row, (0,))
        now = time.perf_counter()
        num_passes += 1
    return (now - started) / num_passes


def _seconds_by_rows(executor: ModelExecutor) -> Seconds:
    """Return the fewest seconds of `_TIMED` passes for each of `COMPARED_ROWS` rows."""
    before = tuple(range(_CONTEXT))
    executor.run(Feed(before, before, before, 0, None), ())
    passes = {
        num_rows: partial(executor.run, Feed.chain(0, num_rows, start=_CONTEXT), range(num_rows))
        for num_rows in COMPARED_ROWS
    }
    fewest_seconds(passes, _WARM)
    return fewest_seconds(passes, _TIMED)
