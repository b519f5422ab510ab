"""What a row wrote that is not finite is found, and wiped on all ranks; a pass is made again."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.forward.not_finite import run_again
from engine.layout.slots import Feed, SlotMap
from engine.model_executor import ModelExecutor
from tests.engine.conftest import Load
from tests.engine.tensor_parallel.test_leading import Told
from tests.engine.tensor_parallel.threads import Threads
from tests.tiny_models import make_model

PROMPT = tuple(range(3, 40))
NAMES = ("reference", "fused")


def poison(executor: ModelExecutor, slot: int, value: float = math.nan) -> None:
    """What a row that overflows in its second layer leaves behind, if it is in lane 1."""
    cache: Any = executor._backend.cache  # type: ignore[union-attr]
    first = executor.lanes.first_slot(1)
    if hasattr(cache, "buffers"):
        (buffer,) = cache.buffers.values()
        buffer[2, 0, 0, first + slot, 3] = value
        buffer[4:, :, :, first + slot - 5 :] = value
    else:
        cache[1, 0, first + slot, 3] = value
        cache[2:, :, first + slot - 5 :] = value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_the_slot_that_is_at_fault_is_found_and_its_lane_is_wiped(
    name: str, value: float, load: Load
) -> None:
    executor = ModelExecutor(load("llama"), 64, num_lanes=2, backend=name)
    want = executor.run(Feed((5, 6), (0, 1), (0, 1), 0, None), (1,))
    executor.copy_prefix(0, 1, 2)
    poison(executor, 20, value)
    assert [executor.not_finite(lane) for lane in range(2)] == [None, 20]
    executor.wipe(1, 2)
    assert executor.not_finite(1) is None
    row = Feed((7,), (2,), (2,), 2, (1,))
    alike = [executor.run(replace(row, lane=lane), (0,)) for lane in range(2)]
    assert torch.equal(*alike), "what comes before it stays"
    assert want.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_warming_up_leaves_nothing_behind(name: str, load: Load) -> None:
    """It runs a token that may be the one that is not finite."""
    loaded = load("llama")
    embeddings = loaded.model.get_input_embeddings().weight
    before = embeddings[0].clone()
    executor = ModelExecutor(loaded, 128, backend=name)
    try:
        with torch.no_grad():
            embeddings[0] = math.nan
        executor.warm_up((1, 4))
    finally:
        with torch.no_grad():
            embeddings[0] = before
    assert executor.not_finite(0) is None


@pytest.mark.parametrize("fixed_rows", [None, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_that_is_made_again_says_the_same(
    name: str, fixed_rows: int | None, load: Load
) -> None:
    executor = ModelExecutor(load("llama"), 128, backend=name, fixed_rows=fixed_rows, layers=(1,))
    executor.set_total(128)
    slots = SlotMap[str](128)
    executor.run(slots.feed_prefix(PROMPT), ())
    nodes = (("a", None, 7, 39), ("b", "a", 8, 40), ("c", None, 9, 39), ("d", "b", 5, 41))
    feed = slots.feed((50, 51), nodes)
    first = executor.forward(executor.lay_out((feed,), (range(1, 6),)), (1,))
    logits, features = first.logits.clone(), first.features
    assert features is not None
    features = features.clone()
    again = run_again(executor, feed, 5, (1,))
    assert again.is_good == (True,) * 5
    assert again.culprit is None
    torch.testing.assert_close(again.logits, logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(again.features, features, atol=1e-4, rtol=1e-4)


def test_also_one_whose_rows_have_left_the_window(load: Load) -> None:
    executor = ModelExecutor(load("mistral_window"), 128, backend="reference")
    slots = SlotMap[int](128, windows=executor.windows)
    executor.run(slots.feed_prefix(PROMPT), ())
    chain = [(at, at - 1 if at else None, 7 + at, len(PROMPT) + at) for at in range(24)]
    feed = slots.feed((), chain)
    assert feed.near
    want = executor.run(feed, range(24))
    torch.testing.assert_close(run_again(executor, feed, 24, ()).logits, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", NAMES)
def test_every_rank_wipes_its_part(backend: str, tmp_path: Path) -> None:
    first, second = Threads(make_model("llama", tmp_path, scale=0.5), 2).loaded
    assert first.rank is not None
    with ThreadPoolExecutor(1) as pool:
        told: Any = Told(second, pool)
        loaded = replace(first, rank=replace(first.rank, followers=told))
        executor = ModelExecutor(loaded, 64, num_lanes=2, backend=backend)
        row = Feed((7,), (0,), (0,), 0, (1,), lane=1)
        want = executor.run(row, (0,))
        inner = [executor._backend._inner, told.follower._backend]  # type: ignore[union-attr]
        for one in inner:
            cache = one.cache
            for buffer in cache.buffers.values() if hasattr(cache, "buffers") else [cache]:
                buffer.fill_(math.nan)
        assert executor.run(row, (0,)).isnan().all()
        assert executor.not_finite(1) is not None
        executor.wipe(1, 0)
        assert executor.not_finite(1) is None
        assert torch.equal(executor.run(row, (0,)), want)
