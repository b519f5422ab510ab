"""Our attention on a CPU is that of its definition, in the order of positions, not of slots."""

import math
from collections.abc import Sequence

import pytest
import torch

from engine.cpu_library import library, why_not_here
from engine.forward.cpu_attention import CpuAttention, Heads, cpu_attention
from engine.layout.attention_windows import FULL, AttentionWindow, LayerKinds
from engine.layout.slots import Span

NEAR = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
HEADS, KV_HEADS, SCALE = 6, 3, 0.3
NUM_SLOTS = 400  # of a lane


@pytest.fixture(autouse=True)
def _library() -> None:
    if (why := why_not_here()) is not None:
        pytest.skip(why)
    assert library() is not None


def some(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Text:
    """The keys and values of a text by position, in lanes of a cache, and queries of its tokens."""

    def __init__(self, dim: int, dtype: torch.dtype, kinds: LayerKinds = FULL) -> None:
        self.dim, self.dtype = dim, dtype
        self.keys, self.values = some(2, KV_HEADS, 320, dim, seed=dim).to(dtype).unbind()
        self.queries = some(320, (HEADS + 2 * KV_HEADS) * dim, seed=1).to(dtype)
        self.cache = 10 * some(2 * KV_HEADS, 2 * NUM_SLOTS, dim, seed=2).to(dtype)
        found = cpu_attention(dtype, 2 * NUM_SLOTS, kinds)
        assert isinstance(found, CpuAttention)
        self.attention = found

    def put(self, positions: Sequence[int], slots: Sequence[int]) -> None:
        self.cache[:KV_HEADS, slots] = self.keys[:, positions]
        self.cache[KV_HEADS:, slots] = self.values[:, positions]

    def want(self, position: int, low: int = 0) -> torch.Tensor:
        """The outputs of the token at a position, by the definition, [heads * dim] float64."""
        shape = KV_HEADS, HEADS // KV_HEADS, self.dim
        query = self.queries[position, : HEADS * self.dim].view(shape).double()
        seen = slice(low, position + 1)
        scores = SCALE * query @ self.keys[:, seen].double().transpose(1, 2)
        return (scores.softmax(-1) @ self.values[:, seen].double()).flatten()

    def chain(self, start: int, end: int, lane: int = 0) -> torch.Tensor:
        """The integers of consecutive rows, [5, n]."""
        at = torch.arange(start, end)
        return torch.stack((at, at, at + lane * NUM_SLOTS, at + 1, 0 * at))

    def attend(self, rows: torch.Tensor, *counts: int, kind: int = 0) -> torch.Tensor:
        """The outputs of rows, whose first line has the position of each one's query."""
        spans = tuple(Span(lane * NUM_SLOTS, count) for lane, count in enumerate(counts))
        heads = Heads(HEADS, KV_HEADS, self.dim, 2 * NUM_SLOTS)
        sight = self.attention.see(rows, spans)
        look = sight.look(kind, heads, self.queries.shape[1], SCALE)
        return self.attention.attend(look, self.queries[rows[0]], *self.cache.chunk(2))


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 24, 200])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128])
def test_attention_is_that_of_its_definition(dim: int, dtype: torch.dtype, num_rows: int) -> None:
    text = Text(dim, dtype)
    text.put(range(320), range(320))
    for start in (0, 15, 16, 100):
        out = text.attend(text.chain(start, start + num_rows), num_rows)
        for row in {0, num_rows // 2, num_rows - 1}:
            assert error(out[row], text.want(start + row)) < 2 * NEAR[dtype]


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("dim", [48, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_bits_whatever_other_rows_there_are(
    dim: int, dtype: torch.dtype, threads: int
) -> None:
    text = Text(dim, dtype)
    text.put(range(320), range(320))
    alone = [text.attend(text.chain(at, at + 1), 1)[0] for at in range(320)]
    torch.set_num_threads(threads)
    for start in (0, 3, 31, 32, 250):
        for count in (2, 5, 16, 17, 64):
            out = text.attend(text.chain(start, start + count), count)
            assert torch.equal(out, torch.stack(alone[start : start + count]))
    # Another text in a second lane, whose rows are more.
    text.put(range(320), range(NUM_SLOTS, NUM_SLOTS + 320))
    rows = torch.cat((text.chain(40, 43), text.chain(7, 100, lane=1)), dim=1)
    assert torch.equal(text.attend(rows, 3, 93), torch.stack(alone[40:43] + alone[7:100]))


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("dim", [48, 64])
def test_a_row_is_the_same_bits_in_whatever_slots_its_ancestors_lie(
    dim: int, dtype: torch.dtype
) -> None:
    text = Text(dim, dtype)
    text.put(range(320), range(320))
    alone = [text.attend(text.chain(at, at + 1), 1)[0] for at in range(320)]
    random = torch.Generator().manual_seed(5)
    for start in (0, 1, 30, 64, 200):
        for count in (1, 2, 20, 64):
            slots = start + torch.randperm(64, generator=random)[:count]
            text.cache[:, start:] = 10 * some(2 * KV_HEADS, 2 * NUM_SLOTS - start, dim).to(dtype)
            text.put(range(start, start + count), slots.tolist())
            bits, path = [], 0
            for slot in slots.tolist():
                path |= 1 << slot - start
                bits.append(path - (1 << 64) if path >> 63 else path)
            at = torch.arange(start, start + count)
            rows = torch.stack((at, at, slots, torch.full_like(at, start), torch.tensor(bits)))
            order = torch.randperm(count, generator=random)
            out = text.attend(rows[:, order], count)
            assert torch.equal(out, torch.stack(alone)[start + order])
            text.put(range(start, 320), range(start, 320))


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("size", [4, 33, 100])
def test_a_window_hides_what_lies_before_it(dtype: torch.dtype, size: int) -> None:
    window = AttentionWindow(size)
    text = Text(64, dtype, LayerKinds.of((None, window)))
    text.put(range(320), range(320))
    chain = text.chain(150, 170)
    lowest = torch.tensor([window.lowest(int(at)) for at in chain[1]])
    rows = torch.cat((chain, lowest[None], torch.zeros_like(lowest)[None]))
    alone = [text.attend(rows[:, i : i + 1], 1, kind=1)[0] for i in range(20)]
    for i, out in enumerate(alone):
        assert error(out, text.want(150 + i, int(lowest[i]))) < 2 * NEAR[dtype]
    assert torch.equal(text.attend(rows, 20, kind=1), torch.stack(alone))
    # As a tree behind 149 tokens, in slots that are turned round.
    count, start = 20, 150
    slots = start + torch.arange(count).flip(0)
    text.put(range(start, start + count), slots.tolist())
    bits = [sum(1 << int(slots[k]) - start for k in range(i + 1)) for i in range(count)]
    near = [
        sum(
            1 << int(slots[k]) - start
            for k in range(i + 1)
            if start + k >= window.lowest(start + i)
        )
        for i in range(count)
    ]
    shown = torch.full_like(slots, start)
    words = shown, torch.tensor(bits), torch.minimum(lowest, shown), torch.tensor(near)
    tree = torch.stack((chain[0], chain[1], slots, *words))
    assert torch.equal(text.attend(tree, count, kind=1), torch.stack(alone))


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    text = Text(64, dtype)
    text.put(range(320), range(320))
    text.queries[51, 5] = math.nan
    out = text.attend(text.chain(50, 53), 3)
    assert out[1, :64].isnan().all()
    out[1] = 0
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_a_row_that_sees_nothing_is_zero(dtype: torch.dtype) -> None:
    text = Text(64, dtype)
    rows = torch.zeros(5, 1, dtype=torch.int64)
    assert not text.attend(rows, 1).any()
