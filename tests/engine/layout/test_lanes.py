"""Several texts in one pass: each gets what it would get alone, and none sees another's lane."""

from collections.abc import Iterator, Sequence
from pathlib import Path as Folder

import pytest
import torch

from engine.checkpoint.model import load_model
from engine.forward.cache_tensors import slot_bytes
from engine.layout.slots import Feed, LaneLayout, Move, SlotMap, Span, is_grid
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from tests.engine.conftest import Load
from tests.engine.forward.test_graphs import recordings  # noqa: F401 (a fixture)
from tests.engine.random_session import Drawn, Path, RandomSession
from tests.engine.test_slot_cache import difference
from tests.tiny_models import make_model

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "opt", "phi3")
TOLERANCE = 1e-5
CAPACITY = 256
NUM_LANES = 4
HUGE = 1e30


def make(
    folder: Folder, backend: str, num_lanes: int = NUM_LANES, device: str = "cpu"
) -> ModelExecutor:
    """float32, with weights of its own."""
    return make_executor(
        load_model(str(folder), dtype="float32", device=device),
        CAPACITY,
        num_lanes=num_lanes,
        backend=backend,
        row_counts=() if backend in ("reference", "fused") else (1, 2, 4, 8),
    )


def poison(executor: ModelExecutor, lane: int) -> None:
    """Fill a lane with what would show in any row that sees it."""
    cache = executor._backend.cache  # type: ignore[union-attr]
    buffers = cache.buffers.values() if hasattr(cache, "buffers") else [cache]
    first, length = executor.lanes.first_slot(lane), executor.lanes.num_slots
    for buffer in buffers:
        buffer.narrow(-2, first, length).fill_(HUGE)


def sessions(lanes: Sequence[int]) -> list[Iterator[Drawn | Move]]:
    """A random text in each lane: other lengths, trees, roll-backs, scattered commits."""
    return [
        RandomSession(
            lane,
            SlotMap[Path](CAPACITY, lane=lane),
            vocab=199,
            prompt_len=30 + 40 * lane,
            max_rows=1 if lane == 2 else 6,
        ).steps(14)
        for lane in lanes
    ]


def run_side_by_side(
    together: ModelExecutor, alone: ModelExecutor, lanes: Sequence[int]
) -> Iterator[tuple[int, float]]:
    """Run sessions on `together` a pass for all, on `alone` each by itself.

    Yields how many texts were in a pass, and the largest difference of its logits.
    """
    texts = sessions(lanes)
    while texts:
        steps = [step for text in texts if (step := next(text, None)) is not None]
        texts = texts if len(steps) == len(texts) else []
        moves = [step for step in steps if isinstance(step, Move)]
        if moves:
            together.move(*moves)
        for move in moves:
            alone.move(move)
        passes = [step for step in steps if isinstance(step, Drawn)]
        chunks = [[step] for step in passes if step.feed.masks is None]
        for group in [*chunks, [step for step in passes if step.feed.masks is not None]]:
            asks = [range(len(step.paths)) for step in group]
            want = [alone.run(s.feed, ask) for s, ask in zip(group, asks, strict=True)]
            if group:
                got = together.run_together([step.feed for step in group], asks)
                yield len(group), difference(got, torch.cat(want))


def check(
    folder: Folder, backend: str, lanes: Sequence[int] = (3, 0, 2), device: str = "cpu"
) -> None:
    """Also that the lane which holds no text is never seen."""
    together, alone = (make(folder, name, device=device) for name in (backend, "reference"))
    assert together.backend == backend
    for lane in set(range(NUM_LANES)) - set(lanes):
        poison(together, lane)
    numbers = set()
    for number, error in run_side_by_side(together, alone, lanes):
        assert error < TOLERANCE
        numbers.add(number)
    assert len(lanes) in numbers


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_texts_equal_texts_alone_on_the_reference(architecture: str, tmp_path: Folder) -> None:
    check(make_model(architecture, tmp_path, scale=0.5), "reference")


@pytest.mark.parametrize("lanes", [(3, 0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_texts_equal_texts_alone_on_the_fused_forward(
    architecture: str, lanes: tuple[int, ...], tmp_path: Folder
) -> None:
    check(make_model(architecture, tmp_path, scale=0.5), "fused", lanes)


@pytest.mark.long
@pytest.mark.usefixtures("recordings")
def test_texts_equal_texts_alone_on_recordings(tmp_path: Folder) -> None:
    check(make_model("llama", tmp_path, scale=0.5), "graphs", (0, 1, 3, 2))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("lanes", [(0, 2), (0, 2, 1)])
def test_one_call_for_all_lanes_is_one_for_each(
    lanes: tuple[int, ...], num_rows: int, load: Load
) -> None:
    executor = ModelExecutor(load("qwen2"), CAPACITY, num_lanes=NUM_LANES, backend="fused")
    feeds = []
    for lane in lanes:  # two at equal distances share a call, and what lies between is not seen
        where = tuple(range(40 + lane))
        executor.run(Feed(tuple(lane + 3 * i for i in where), where, where, 0, None, lane), ())
        rows = tuple(range(len(where), len(where) + num_rows))
        masks = tuple((2 << i) - 1 for i in range(num_rows))
        feeds.append(Feed(rows, rows, rows, len(where), masks, lane))
    if 1 not in lanes:
        poison(executor, 1)
    asks = [range(num_rows)] * len(lanes)
    want = [executor.run(feed, ask) for feed, ask in zip(feeds, asks, strict=True)]
    assert difference(executor.run_together(feeds, asks), torch.cat(want)) < TOLERANCE
    swapped = executor.run_together(feeds[::-1], asks)
    assert difference(swapped, torch.cat(want[::-1])) < TOLERANCE


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_a_copied_prefix_is_as_good_as_its_own(backend: str, load: Load) -> None:
    executor = ModelExecutor(load("llama"), CAPACITY, num_lanes=3, backend=backend)
    where = tuple(range(50))
    executor.run(Feed(where, where, where, 0, None, 2), ())
    executor.copy_prefix(2, 0, 30)
    poison(executor, 2)
    rest = tuple(range(30, 50))
    want = ModelExecutor(load("llama"), CAPACITY).run(Feed(where, where, where, 0, None), (49,))
    got = executor.run(Feed(rest, rest, rest, 30, None), (19,))
    assert difference(got, want) < TOLERANCE


def test_a_lane_twice_and_a_lane_that_is_not_there_are_refused(load: Load) -> None:
    executor = ModelExecutor(load("llama"), 64, num_lanes=2, backend="fused")
    row = Feed((5,), (0,), (0,), 0, (1,), 1)
    with pytest.raises(AssertionError, match="two feeds of one lane"):
        executor.run_together([row, row], [(0,), (0,)])
    with pytest.raises(AssertionError, match="lane 2, but the cache has 2"):
        executor.run(Feed((5,), (0,), (0,), 0, (1,), 2), (0,))


def test_lanes_at_equal_distances_are_a_grid() -> None:
    def spans(*pairs: tuple[int, int]) -> list[Span]:
        return [Span(first, num_rows) for first, num_rows in pairs]

    assert is_grid(spans((64, 2), (128, 2), (192, 2)))
    assert is_grid(spans((0, 1), (192, 1)))
    assert not is_grid(spans((0, 1), (64, 1), (192, 1)))
    assert not is_grid(spans((0, 1), (64, 2)))


def test_a_buffer_has_the_lanes_that_memory_was_counted_for(load: Load) -> None:
    loaded = load("llama")
    per_slot = slot_bytes(loaded.model, loaded.device)
    executor = ModelExecutor(loaded, 100, num_lanes=3, fixed_rows=4)
    (buffer,) = executor._backend.cache.buffers.values()  # type: ignore[union-attr]
    assert buffer.nbytes == executor.lanes.total * per_slot
    assert executor.lanes == LaneLayout(3, 104)
