"""Random sessions on an executor, whose rows' logits transformers computes again from scratch."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from engine.layout.slots import Move, SlotMap
from engine.model_executor import ModelExecutor
from tests.engine.random_session import Drawn, Path, RandomSession
from tests.engine.test_slot_cache import difference


def from_scratch(model: Any, paths: Sequence[Path]) -> torch.Tensor:
    """Return the logits [len(paths), V] after each path, of the model's own forward over it."""
    whole = [path for path in paths if not any(_begins(other, path) for other in paths)]
    whole = list(dict.fromkeys(whole))
    longest = max(map(len, whole))
    # What stands to the right of a token changes nothing.
    ids = torch.tensor([[*path, *[0] * (longest - len(path))] for path in whole])
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits
    found = [next(i for i, w in enumerate(whole) if w[: len(path)] == path) for path in paths]
    return logits[found, [len(path) - 1 for path in paths]]


def errors(executor: ModelExecutor, model: Any, seed: int) -> Iterator[float]:
    """Yield the largest relative error of each pass of two texts; the second copies the first.

    The trees are deeper than a window is long, and roll-backs and commits pass its edge. When the
    first text has grown, the second begins as a copy of most of it; then passes have both.

    model  transformers' own, of the same weights
    """
    assert executor.lanes.count >= 2
    first, second = (
        RandomSession(
            seed + lane,
            SlotMap(executor.capacity, lane=lane, windows=executor.windows),
            vocab=executor.loaded.vocab_size,
            prompt_len=41,
            max_rows=24,
            depth=0.85,
            reach=0.9,
        )
        for lane in range(2)
    )
    for step in first.steps(4):
        yield from _taken(executor, model, [step])
    # The copy ends within a window of the first text's end.
    length = first.slots.prefix_len - 5
    executor.copy_prefix(0, 1, length)
    second.begin_with(first, length)
    for pair in zip(first.steps(60), second.steps(60), strict=False):
        yield from _taken(executor, model, pair)


def _taken(executor: ModelExecutor, model: Any, steps: Sequence[Drawn | Move]) -> Iterator[float]:
    """Take one step of each text; yield the error if any is a pass."""
    drawn = [step for step in steps if isinstance(step, Drawn)]
    moves = [step for step in steps if isinstance(step, Move)]
    if moves:
        executor.move(*moves)
    alone = [[step] for step in drawn]
    for group in [drawn] if all(step.feed.masks for step in drawn) and drawn else alone:
        asks = [range(len(step.paths)) for step in group]
        got = executor.run_together([step.feed for step in group], asks)
        want = from_scratch(model, [path for step in group for path in step.paths])
        yield difference(got, want)


def _begins(text: Path, path: Path) -> bool:
    """True if `path` is the beginning of the longer `text`."""
    return len(text) > len(path) and text[: len(path)] == path
