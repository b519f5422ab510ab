"""Attention split over the keys: what it sees, when it is chosen, and what becomes of its faults.

Its programs stand here as plain operators (`flex_forms.spelt_out`); what is compiled is in
test_flex_programs.py.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import engine.forward.flex_attention
import engine.forward.graphs
from engine.checkpoint.model import load_model
from engine.errors import ModelError
from engine.forward.flex_attention import EVERY_LENGTH, FlexAttention, sees
from engine.forward.forward import Shape
from engine.forward.fused import FusedBackend
from engine.forward.graphs import GraphBackend
from engine.forward.masks import as_words, from_words
from engine.layout.slots import Feed
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from engine.timing import Form, quickest
from tests.engine.flex_forms import always, counted, spelt_out
from tests.engine.forward.test_fused import TOLERANCES, UPPER, save, session_differences
from tests.engine.forward.test_graphs import NUM_SLOTS, ROW_COUNTS, pair, recordings  # noqa: F401 (a fixture)
from tests.engine.layout.test_lanes import check
from tests.engine.test_slot_cache import difference
from tests.tiny_models import make_model

Seen = Callable[..., torch.Tensor]


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let attention of captured passes be split at every length; the list has the rows of each."""
    captured: list[int] = []
    monkeypatch.setattr(engine.forward.graphs, "RECORDED_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.graphs, "recorder", counted(captured))
    monkeypatch.setattr(engine.forward.graphs, "SPLIT_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.flex_attention, "_compiled", lambda: spelt_out)
    monkeypatch.setattr(engine.forward.flex_attention, "quickest", always("split"))
    return captured


def graphs_of(executor: ModelExecutor) -> GraphBackend:
    assert isinstance(executor._backend, GraphBackend)
    return executor._backend


def a_step(start: int, num_rows: int) -> Feed:
    where = tuple(range(start, start + num_rows))
    return Feed((5,) * num_rows, where, where, start, tuple((2 << i) - 1 for i in range(num_rows)))


def prefill(*executors: ModelExecutor) -> None:
    where = tuple(range(NUM_SLOTS - 1))
    for executor in executors:
        executor.run(Feed(tuple(i * i % 199 for i in where), where, where, 0, None), ())


def test_a_query_sees_what_the_mask_shows() -> None:
    random = np.random.default_rng(2)
    for prefix_len in (1, 63, 64, 130, 191, 250):
        masks = [int(x) for x in random.integers(0, 1 << 64, 6, dtype=np.uint64)]
        words = torch.tensor(as_words(range(6), prefix_len, masks))
        mask = from_words(words, 256, torch.float32)[0, 0]
        queries, slots = torch.arange(6)[:, None], torch.arange(256)
        got = sees(words.view(2, 1, 6), torch.tensor(0), queries, slots)
        assert torch.equal(got, mask == 0)
        assert got.any()
        assert not got.all()


def test_in_a_window_a_query_sees_what_the_mask_shows() -> None:
    flex = FlexAttention(1024, group=1, num_lanes=2)
    shown = torch.tensor([300, 300, 700, 700])
    lowest = torch.tensor([250, 260, 300, 255])
    words = torch.stack((shown, torch.tensor([1, 5, 1, 7]), lowest))
    firsts = torch.tensor([1024, 0])
    visible = flex.see(words, firsts)
    assert visible.num_blocks.flatten().tolist() == [2, 5]  # of 128 slots, from the first seen on
    assert visible.blocks[:, 0, 0, :5].tolist() == [[9, 10, 11, 12, 13], [1, 2, 3, 4, 5]]
    mask = from_words(words, 1024, torch.float32)[0, 0]
    slots, queries = torch.arange(1024), torch.arange(2)[:, None]
    for lane, first in enumerate(firsts):
        got = sees(visible.words, torch.tensor(lane), queries, slots + first)
        assert torch.equal(got, mask[2 * lane : 2 * lane + 2] == 0)


@pytest.mark.parametrize("architecture", ["mistral", "qwen3"])
def test_windows_get_the_logits_of_the_reference(
    architecture: str, tmp_path: Path, split: list[int]
) -> None:
    flags = {"sliding_window": 40, **UPPER[architecture]}
    reference, graphs = pair(save(architecture, tmp_path, flags))
    graphs.warm_up((1,))
    for seed in range(3):
        for error in session_differences(reference, graphs, seed=seed):
            assert error < TOLERANCES["float32"]
    assert graphs_of(graphs)._split_from, "attention is split over the keys"


def test_blocks_are_read_up_to_the_last_slot_that_a_tree_can_reach() -> None:
    flex = FlexAttention(1024, group=2, num_lanes=4)
    shown = torch.tensor([5, 5, 64, 64, 65, 65, 1000, 1000])
    words = torch.stack((shown, torch.zeros_like(shown)))
    visible = flex.see(words, torch.tensor([0, 3, 1, 2]) * 1024)
    assert visible.num_blocks.flatten().tolist() == [1, 1, 2, 8]
    assert visible.num_blocks.shape == (4, 1, 1)
    blocks = [list(range(first, first + 8)) for first in (0, 24, 8, 16)]
    assert visible.blocks.flatten(1)[:, :8].tolist() == blocks
    assert visible.blocks.shape == (4, 1, 1, 32)
    assert int(visible.blocks.max()) < 32
    assert visible.blocks.dtype == torch.int32
    assert visible.words.shape == (2, 4, 4)
    assert visible.words[0, 2].tolist() == [1024 + 65] * 4, "counted in the whole cache"


@pytest.mark.long
def test_one_recording_for_each_number_of_rows_serves_all_lengths(
    tmp_path: Path,
    split: list[int],
    recordings: list[int],  # noqa: F811
) -> None:
    reference, graphs = pair(make_model("llama", tmp_path, scale=0.5))
    graphs.warm_up((1,))
    recorded = len(recordings)
    prefill(reference, graphs)
    for start in (0, 100, 255, 300, NUM_SLOTS - 8):
        for num_rows in (1, 2, 3, 4):
            feed = a_step(start, num_rows)
            ask = range(num_rows)
            assert difference(graphs.run(feed, ask), reference.run(feed, ask)) < 1e-5
    assert len(recordings) == recorded
    assert not split, "in place of these"
    assert graphs.num_uncaptured == 0
    lengths = [length for _, length in graphs_of(graphs)._recorded]
    assert lengths == [EVERY_LENGTH] * len(ROW_COUNTS)


def test_sessions_get_the_logits_of_the_reference(tmp_path: Path, split: list[int]) -> None:
    reference, graphs = pair(make_model("qwen3", tmp_path, scale=0.5))
    graphs.warm_up((1,))
    recorded = len(split)
    for seed in range(3):
        for error in session_differences(reference, graphs, seed=seed):
            assert error < TOLERANCES["float32"]
    assert len(split) == recorded


def test_texts_equal_texts_alone_in_split_passes(tmp_path: Path, split: list[int]) -> None:
    check(make_model("llama", tmp_path, scale=0.5), "graphs", (0, 1, 3, 2))


def test_short_passes_keep_the_mask_where_that_is_faster(
    tmp_path: Path, split: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def by_length(forms: Sequence[Form], *_: object, **__: object) -> str:
        rows = forms[0].run.args[1]  # type: ignore[attr-defined]
        needed = int(rows[3, 0]) + rows.shape[1]
        asked.append(needed)
        return "split" if needed > 300 else "masked"

    monkeypatch.setattr(engine.forward.flex_attention, "quickest", by_length)
    reference, graphs = pair(make_model("llama", tmp_path, scale=0.5))
    longest = 448  # whole steps of slots, without those of rows that fill a pass up
    assert asked == [longest, 256] * len(ROW_COUNTS)
    graphs.warm_up((1,))
    recorded = len(split)
    lengths = {length for _, length in graphs_of(graphs)._recorded}
    assert lengths == {256, EVERY_LENGTH}
    prefill(reference, graphs)
    for start in (0, 200, 252, 253, 380):
        feed = a_step(start, 4)
        assert difference(graphs.run(feed, range(4)), reference.run(feed, range(4))) < 1e-5
    assert len(split) == recorded
    assert graphs.num_uncaptured == 0


def test_whatever_is_chosen_by_timing_gives_the_logits_of_the_reference(
    tmp_path: Path, split: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.forward.flex_attention, "quickest", quickest)
    reference, graphs = pair(make_model("llama", tmp_path, scale=0.5))
    assert len(split) >= 2 * len(ROW_COUNTS)
    for error in session_differences(reference, graphs, seed=3):
        assert error < TOLERANCES["float32"]


def test_where_the_mask_is_faster_nothing_is_split(
    tmp_path: Path, split: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.forward.flex_attention, "quickest", always("masked"))
    _, graphs = pair(make_model("llama", tmp_path))
    graphs.warm_up((1,))
    lengths = {length for _, length in graphs_of(graphs)._recorded}
    assert lengths == {256, 384, 448}


def off_by_one(words: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
    """The slot behind the prefix counts as one of it."""
    return sees(words + torch.tensor([1, 0])[:, None, None], *where)


def of_the_next_query(
    words: torch.Tensor, lane: torch.Tensor, query: torch.Tensor, slot: torch.Tensor
) -> torch.Tensor:
    return sees(words, lane, (query + 1) % words.shape[2], slot)


def without_a_tree(words: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
    return sees(words * torch.tensor([1, 0])[:, None, None], *where)


@pytest.mark.parametrize("wrong", [off_by_one, of_the_next_query, without_a_tree])
def test_a_wrong_mask_is_caught_before_it_is_used(
    wrong: Seen,
    tmp_path: Path,
    split: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine.forward.flex_attention, "sees", wrong)
    with caplog.at_level(logging.INFO, logger="engine.forward.flex_attention"):
        reference, graphs = pair(make_model("llama", tmp_path, scale=0.5))
    assert "4 rows keeps its mask: FlexAttention gives other numbers" in caplog.text
    for error in session_differences(reference, graphs, seed=1):
        assert error < TOLERANCES["float32"]
    assert not {(1, 2), (1, 4)} & set(graphs_of(graphs)._split_from)  # queries of one row are alike


def test_what_cannot_be_compiled_keeps_its_mask(
    tmp_path: Path,
    split: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> torch.Tensor:
        raise NotImplementedError("no such kernel\nand much more")

    monkeypatch.setattr(engine.forward.flex_attention, "_compiled", lambda: fails)
    with caplog.at_level(logging.INFO, logger="engine.forward.flex_attention"):
        reference, graphs = pair(make_model("llama", tmp_path, scale=0.5))
    assert "keeps its mask: FlexAttention cannot be compiled (" in caplog.text
    for error in session_differences(reference, graphs, seed=2):
        assert error < TOLERANCES["float32"]


def test_reproducible_passes_keep_their_mask(tmp_path: Path, split: list[int]) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    executor = make_executor(loaded, 192, backend="graphs", fixed_rows=4)
    assert graphs_of(executor)._split_from == {}


def test_what_the_check_leaves_in_the_cache_is_finite_and_nothing(
    tmp_path: Path, split: list[int]
) -> None:
    _, graphs = pair(make_model("llama", tmp_path))
    cache = graphs_of(graphs).cache
    assert cache.isfinite().all()
    before = cache.clone()
    graphs_of(graphs)._fused.make_split((1, 4))
    assert not cache[0].any()
    assert torch.equal(cache[1:], before[1:])


def test_two_calls_take_what_is_too_much_for_one_and_no_more() -> None:
    flex = FlexAttention(1000, group=8)
    assert flex.takes(15)
    assert flex.takes(17)
    assert flex.takes(30)
    assert not flex.takes(31)
    assert not FlexAttention(1000, group=128).takes(1)


@pytest.mark.parametrize(("num_rows", "sizes"), [(15, [120]), (16, [64] * 2), (17, [72] * 2)])
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_rows_of_a_large_group_are_split_in_calls_of_one_size(
    num_rows: int, sizes: list[int], num_lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def program(query: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        asked.append(query.shape[2])
        assert query.is_contiguous()
        return spelt_out(query, *rest)

    monkeypatch.setattr(engine.forward.flex_attention, "_compiled", lambda: program)
    keys, values = torch.randn(2, 1, 2, num_lanes * 384, 16)
    with torch.inference_mode():  # which compares with the masked form
        FlexAttention(384, group=8, num_lanes=num_lanes).make(
            (num_lanes, num_rows), keys, values, 0.25
        )
    assert asked == sizes * 3


def test_a_call_that_is_left_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.forward.flex_attention, "_compiled", lambda: spelt_out)
    flex = FlexAttention(384, group=8)
    first = range(72)
    monkeypatch.setattr(flex, "_tiles", lambda _: [first, first])
    keys, values = torch.randn(2, 1, 2, 384, 16)
    with pytest.raises(ModelError), torch.inference_mode():
        flex.make((1, 17), keys, values, 0.25)


def test_more_rows_than_are_split_keep_their_mask(
    tmp_path: Path, split: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.forward.flex_attention, "_MOST_TILES", 1)
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    executor = make_executor(loaded, 320, backend="graphs", row_counts=(4, 64))
    assert set(graphs_of(executor)._split_from) == {(1, 4)}
    with pytest.raises(ModelError, match="no pass of so many rows"):
        graphs_of(executor)._fused.make_split((1, 64))


def test_a_program_that_takes_long_to_compile_is_said_and_which_of_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: list[int]
) -> None:
    now = [0.0]
    make = FusedBackend.make_split

    def slow(fused: FusedBackend, shape: Shape) -> None:
        make(fused, shape)
        now[0] += 30.0 if shape == (1, 4) else 0.1

    monkeypatch.setattr(FusedBackend, "make_split", slow)
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(engine.forward.flex_attention, "time", clock)
    said: list[str] = []
    loaded = load_model(str(make_model("llama", tmp_path)))
    make_executor(loaded, 300, backend="graphs", row_counts=(1, 4, 8), say=said.append)
    assert said == ["checking", "compiling attention: 2 of 3"]
