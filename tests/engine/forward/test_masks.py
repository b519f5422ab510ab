"""How integers become the masks and the writes of a pass."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import engine.forward.masks
from engine.forward.forward import _first_of_run
from engine.forward.masks import (
    KindMasks,
    Masks,
    _unpack,
    as_words,
    from_words,
    window_words,
)
from engine.forward.masks import words_of as masks_words_of
from engine.layout.attention_windows import AttentionWindow, LayerKinds
from engine.layout.slots import Feed
from engine.model_executor import ModelExecutor
from tests.engine.conftest import Load


def dumb_mask(
    prefix_len: int, masks: tuple[int, ...], num_visible: int, dtype: torch.dtype
) -> torch.Tensor:
    mask = torch.full((1, 1, len(masks), num_visible), torch.finfo(dtype).min, dtype=dtype)
    for row, bits in enumerate(masks):
        for slot in range(num_visible):
            if slot < prefix_len or bits >> (slot - prefix_len) & 1:
                mask[0, 0, row, slot] = 0
    return mask


def words_of(slots: Sequence[int], prefix_len: int, masks: Sequence[int] | None) -> torch.Tensor:
    """Rows of which only the words matter here."""
    return torch.tensor((slots, slots, slots, *as_words(slots, prefix_len, masks)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(5))
def test_masks_that_are_patched_equal_masks_made_anew(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    made = Masks(dtype)
    num_visible = 128
    for _ in range(60):
        if draw.random() < 0.1:
            num_visible = draw.choice([64, 128, 192, 150])
        prefix_len = draw.randrange(num_visible)
        room = min(64, num_visible - prefix_len)
        masks = tuple(draw.randrange(1 << room) for _ in range(draw.randint(1, 4)))
        if draw.random() < 0.4:
            masks = ((1 << draw.randint(0, room)) - 1,)
        got = made.build(words_of([0] * len(masks), prefix_len, masks), num_visible)
        assert torch.equal(got, dumb_mask(prefix_len, masks, num_visible, dtype))


@pytest.mark.parametrize("size", [1, 7, 90])
@pytest.mark.parametrize("seed", range(5))
def test_windows_that_are_patched_equal_windows_made_anew(seed: int, size: int) -> None:
    """Texts grow, are rolled back, and are others; also in two lanes."""
    draw = random.Random(seed)
    made, window = Masks(torch.float32), AttentionWindow(size, is_chunk=draw.random() < 0.5)
    counts = draw.choice([(), (2, 1), (3, 3)])
    prefixes = [draw.randrange(100) for _ in counts or (1,)]
    for _ in range(80):
        parts = []
        for lane in range(len(prefixes)):
            step = draw.choice([0, 1, 1, 3, 9, -5, 0 if draw.random() < 0.9 else -100])
            prefixes[lane] = min(max(prefixes[lane] + step, 0), 120)
            count = counts[lane] if counts else draw.randint(1, 4)
            parts.append(_rows_in_window(draw, prefixes[lane], count, window))
        rows = torch.cat(parts, dim=1)
        got = made.build(rows, 128, counts, window=0)
        assert torch.equal(got, from_words(masks_words_of(rows, 0), 128, torch.float32))
        for row in range(rows.shape[1]):
            _, _, _, shown, bits, lowest, near = rows[:, row].tolist()
            seen = list(range(lowest, shown))
            seen += [shown + bit for bit in range(8) if near >> bit & 1]
            assert (got[0, 0, row] == 0).nonzero()[:, 0].tolist() == seen
            assert near & bits == near


def _rows_in_window(
    draw: random.Random, prefix_len: int, count: int, window: AttentionWindow
) -> torch.Tensor:
    """Return rows of a lane [7, count]: each at the end of a chain after the prefix."""
    depths = [draw.randint(1, 8) for _ in range(count)]
    masks = [(1 << depth) - 1 for depth in depths]
    positions = [prefix_len + depth - 1 for depth in depths]
    near = [
        mask & ~((1 << max(window.lowest(at) - prefix_len, 0)) - 1)
        for at, mask in zip(positions, masks, strict=True)
    ]
    words = as_words(positions, prefix_len, masks)
    words += window_words(positions, *words, window, near)
    return torch.tensor((positions, positions, positions, *words))


def test_a_causal_chunk_in_a_window_shows_each_row_its_last_tokens() -> None:
    where = (3, 4, 5, 6)
    words = as_words(where, 3, None)
    words += window_words(where, *words, AttentionWindow(2), None)
    rows = torch.tensor((where, where, where, *words))
    got = Masks(torch.float32).build(rows, 8, window=0)
    seen = [(row == 0).nonzero()[:, 0].tolist() for row in got[0, 0]]
    assert seen == [[2, 3], [3, 4], [4, 5], [5, 6]]
    assert torch.equal(got, from_words(masks_words_of(rows, 0), 8, torch.float32))


def test_slots_that_no_row_sees_are_left_out_only_where_that_is_allowed() -> None:
    kinds = LayerKinds.of([None, AttentionWindow(10)])
    made = KindMasks(kinds, torch.device("cpu"), torch.float32)
    words = as_words((200,), 200, (1,))
    words += window_words((200,), *words, AttentionWindow(10), None)
    rows = torch.tensor(((200,), (200,), (200,), *words))
    lengths = []
    for made.are_cut in (False, True):
        _, (full, near) = made.build(rows, 256, (1,))
        lengths.append((full.shape[3], near.shape[3]))
        assert int((near == 0).sum()) == 10
    assert lengths == [(256, 256), (256, 256 - 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_causal_mask_shows_each_row_its_past(dtype: torch.dtype) -> None:
    got = Masks(dtype).build(words_of([3, 4, 5], 3, None), 8)
    assert torch.equal(got, dumb_mask(3, (1, 3, 7), 8, dtype))


def test_masks_use_all_64_bits() -> None:
    words = as_words((0, 1, 2), 0, ((1 << 64) - 1, 1 << 63, 5))
    bits = _unpack(np.array(words[1]))
    assert bits.shape == (3, 64)
    assert bits.sum(axis=1).tolist() == [64, 1, 2]
    assert bits[1, 63]
    assert bits[2, :3].tolist() == [1, 0, 1]


def test_only_ascending_consecutive_slots_are_a_run() -> None:
    for slots, first in [((7,), 7), ((7, 8), 7), ((7, 8, 9), 7), ((8, 7), None)]:
        assert _first_of_run(torch.tensor(slots)) == first
    for slots in ((7, 9), (4, 6, 5, 7), (5, 5), (9, 8, 7)):
        assert _first_of_run(torch.tensor(slots)) is None


def test_slots_out_of_order_hold_what_slots_in_order_hold(load: Load) -> None:
    executor = ModelExecutor(load("llama"), 128)
    prompt = tuple(range(20, 30))
    where = tuple(range(10))
    logits = []
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)):
        executor.run(Feed(prompt, where, where, 0, None), ())
        bits = [sum(1 << order[j] for j in range(i + 1)) for i in range(4)]
        slots = tuple(10 + place for place in order)
        feed = Feed((1, 2, 3, 4), (10, 11, 12, 13), slots, 10, tuple(bits))
        last = Feed((5,), (14,), (14,), 10, (31,))
        logits.append(torch.cat([executor.run(feed, range(4)), executor.run(last, (0,))]))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-4, atol=1e-4)


def test_the_mask_of_a_long_prompt_is_made_of_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = torch.tensor(as_words(range(10, 31), 0, None))
    whole = from_words(words, 100, torch.float32)
    assert (whole[0, 0] == 0).sum(1).tolist() == list(range(11, 32))
    made: list[int] = []
    hidden = engine.forward.masks._is_hidden

    def watched(part: torch.Tensor, num_visible: int) -> torch.Tensor:
        made.append(part.shape[1] * num_visible)
        return hidden(part, num_visible)

    monkeypatch.setattr(engine.forward.masks, "_is_hidden", watched)
    for most, pieces in ((2100, [2100]), (1000, [1000, 1000, 100]), (5, [100] * 21)):
        monkeypatch.setattr(engine.forward.masks, "MOST_AT_ONCE", most)
        made.clear()
        assert torch.equal(from_words(words, 100, torch.float32), whole)
        assert made == pieces
