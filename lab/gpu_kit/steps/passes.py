"""Times passes of one model by backend, context length and rows: first pass in a shape, and later.

A pass ends when the index of the largest logit of each row is on the host, as in a text. The first
pass in a shape may have to record a CUDA graph: the first text of such a length pays for that.
"""

import sys
from collections.abc import Sequence
from statistics import median

import torch

from engine.checkpoint.files import one_line
from engine.checkpoint.model import load_model
from engine.errors import ModelError, OutOfMemory
from engine.layout.slots import NUM_TREE_SLOTS
from engine.loading import BACKENDS, make_executor
from engine.model_executor import ModelExecutor
from lab.gpu_kit.steps.context import Context, run_step, say
from lab.gpu_kit.steps.models import long_model, models_in
from lab.measure.passes import chain, read_up_to
from lab.measure.timing import free_memory, seconds

# `auto` is a name for another backend.
NOT_TIMED = ("auto",)
ROW_COUNTS = {"target": (1, 2, 5, 9, 17), "drafter": (1, 4, 8)}
ROW_COUNTS_SMALL = (1, 5)
CONTEXTS = (200, 500, 4000, 32_000)
CONTEXTS_SMALL = (60, 200)
SLOW = ("reference",)  # timed for comparison, and only with short contexts
SHORT = 500
TIMED = 20
NO_MEMORY = (OutOfMemory, torch.OutOfMemoryError)  # of the engine, and of torch within a pass


def contexts_of(backend: str, *, is_small: bool) -> tuple[int, ...]:
    """Return the context lengths (tokens before the rows) with which a backend is timed."""
    contexts = CONTEXTS_SMALL if is_small else CONTEXTS
    return tuple(length for length in contexts if length <= SHORT or backend not in SLOW)


def row_counts_of(context: Context) -> tuple[int, ...]:
    """Return the numbers of rows of the passes that are timed."""
    return ROW_COUNTS_SMALL if context.is_small else ROW_COUNTS[context.which]


def in_order(backends: Sequence[str]) -> list[str]:
    """Return the backends, the important ones first, since the time may not suffice for all."""
    return sorted(backends, key=lambda name: (name in SLOW, name != "graphs"))


def measure(context: Context) -> None:
    """Time all backends that run on the device."""
    models = models_in(context)
    folder = long_model(context, models.target if context.which == "target" else models.drafter)
    for backend in in_order([name for name in BACKENDS if name not in NOT_TIMED]):
        cells = _cells(context, backend)
        if backend == "graphs" and not context.is_on_gpu:
            context.record.skipped(backend, "CUDA graphs need a GPU")
            continue
        if all(context.record.has(cell) for cell, *_ in cells):
            continue
        try:
            _time(context, str(folder), backend, cells)
        except ModelError as error:
            context.record.failed(backend, str(error))
            say(f"{backend} is left out: {error}")
        free_memory()


def _cells(context: Context, backend: str) -> list[tuple[str, int, int]]:
    """Return (name, tokens before the rows, rows) of each cell, short contexts first."""
    return [
        (f"{backend} {length}|{num_rows} row{'s' * (num_rows > 1)}", length, num_rows)
        for length in contexts_of(backend, is_small=context.is_small)
        for num_rows in row_counts_of(context)
    ]


def _time(
    context: Context, model: str, backend: str, cells: Sequence[tuple[str, int, int]]
) -> None:
    """Load the model with one backend and time its cells. Raises ModelError.

    Afterwards nothing refers to the model, so its memory can be freed.
    """
    loaded = load_model(model, device=context.device)
    row_counts = row_counts_of(context)
    capacity = max(length for _, length, _ in cells) + NUM_TREE_SLOTS
    executor = make_executor(loaded, capacity, backend=backend, row_counts=row_counts)
    read = 0
    try:
        for cell, length, num_rows in cells:
            if context.record.has(cell):
                continue
            try:
                read = read_up_to(executor, read, length)
                first_s, pass_s = pass_seconds(executor, length, num_rows)
            except NO_MEMORY as error:  # another cell may have room
                context.record.failed(cell, one_line(error))
                free_memory()
                continue
            context.record.measured(cell, pass_ms=pass_s * 1e3, first_ms=first_s * 1e3)
            say(f"{context.which} {cell}: {pass_s * 1e3:.3f} ms, first {first_s * 1e3:.1f} ms")
    finally:
        executor.free()


def pass_seconds(executor: ModelExecutor, length: int, num_rows: int) -> tuple[float, float]:
    """Return the seconds of the first pass of a chain after `length` tokens, and a later median."""
    feed = chain(num_rows, length)

    def run() -> torch.Tensor:
        return executor.run(feed, range(num_rows)).argmax(-1).cpu()

    device = executor.loaded.device
    took = [seconds(run, device) for _ in range(TIMED + 1)]
    return took[0], median(took[1:])


if __name__ == "__main__":
    sys.exit(run_step(measure))
