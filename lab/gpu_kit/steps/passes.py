"""Passes of one model by backend, context and rows: the first in a shape, and the usual one.

A pass ends when the largest logit of each row is on the host, as in a text. The first in a shape
may have to record it: what a text would pay that is the first of its length.
"""

import sys
from collections.abc import Sequence
from statistics import median

import torch

from engine.checkpoint.model import load_model
from engine.errors import ModelError, OutOfMemory
from engine.executor import ModelExecutor
from engine.layout.slots import NUM_TREE_SLOTS
from engine.loading import BACKENDS, make_executor
from lab.gpu_kit.steps.context import Context, run_step, say
from lab.gpu_kit.steps.models import long_model, models_in
from lab.measure.passes import chain, read_up_to
from lab.measure.timing import free_memory, seconds

NOT_TIMED = ("auto", "compiled")  # a name for another one; for CPUs, and it takes a minute to load
ROW_COUNTS = {"target": (1, 2, 5, 9, 17), "drafter": (1, 4, 8)}
ROW_COUNTS_SMALL = (1, 5)
CONTEXTS = (200, 500, 4000, 32_000)
CONTEXTS_SMALL = (60, 200)
SLOW = ("reference",)  # for comparison only: at short contexts
SHORT = 500
TIMED = 20


def contexts_of(backend: str, *, is_small: bool) -> tuple[int, ...]:
    """Numbers of tokens before the rows."""
    contexts = CONTEXTS_SMALL if is_small else CONTEXTS
    return tuple(length for length in contexts if length <= SHORT or backend not in SLOW)


def row_counts_of(context: Context) -> tuple[int, ...]:
    """Rows of a pass."""
    return ROW_COUNTS_SMALL if context.is_small else ROW_COUNTS[context.which]


def in_order(backends: Sequence[str]) -> list[str]:
    """What matters comes first: the time may not last for all."""
    return sorted(backends, key=lambda name: (name in SLOW, name != "graphs"))


def measure(context: Context) -> None:
    """All backends that the device takes."""
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
    """(name, tokens before the rows, rows), short contexts first."""
    return [
        (f"{backend} {length}|{num_rows} row{'s' * (num_rows > 1)}", length, num_rows)
        for length in contexts_of(backend, is_small=context.is_small)
        for num_rows in row_counts_of(context)
    ]


def _time(
    context: Context, model: str, backend: str, cells: Sequence[tuple[str, int, int]]
) -> None:
    """Raises ModelError. Whatever was loaded is garbage afterwards."""
    loaded = load_model(model, device=context.device)
    row_counts = row_counts_of(context)
    capacity = max(length for _, length, _ in cells) + NUM_TREE_SLOTS
    executor = make_executor(loaded, capacity, backend=backend, row_counts=row_counts)
    read = 0
    try:
        for cell, length, num_rows in cells:
            if context.record.has(cell):
                continue
            read = read_up_to(executor, read, length)
            first_s, pass_s = pass_seconds(executor, length, num_rows)
            context.record.measured(cell, pass_ms=pass_s * 1e3, first_ms=first_s * 1e3)
            say(f"{context.which} {cell}: {pass_s * 1e3:.3f} ms, first {first_s * 1e3:.1f} ms")
    except OutOfMemory as error:
        context.record.failed(backend, str(error))
    finally:
        executor.free()


def pass_seconds(executor: ModelExecutor, length: int, num_rows: int) -> tuple[float, float]:
    """The first pass of a chain behind `length` tokens, and the median of later ones."""
    feed = chain(num_rows, length)

    def run() -> torch.Tensor:
        return executor.run(feed, range(num_rows)).argmax(-1).cpu()

    device = executor.loaded.device
    took = [seconds(run, device) for _ in range(TIMED + 1)]
    return took[0], median(took[1:])


if __name__ == "__main__":
    sys.exit(run_step(measure))
