"""What the rows of a pass see: two integers a row, and the mask that each backend makes of them.

A mask goes through the engine as integers (`as_words`). A backend on the CPU keeps the numbers that
are added to the attention scores from pass to pass (`Masks`); one on a device makes them there
(`from_words`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Slots = npt.NDArray[np.int64]

# A mask is added to the attention scores. Its "hidden" is the type's lowest finite number, as in
# transformers: it becomes exactly zero in the softmax, and a row that sees nothing is no NaN.
MASK_BITS = 64
_ALL_BITS = (1 << MASK_BITS) - 1
_LARGEST = (1 << MASK_BITS - 1) - 1
_BITS = {torch.float32: np.int32, torch.bfloat16: np.int16, torch.float16: np.int16}
_MOST_MADE = 32
MOST_AT_ONCE = 1 << 21  # elements of a mask that are made together: 25 bytes each, 50 MB
_Made = tuple[torch.Tensor, Any, list[tuple[int, int]]]


class Masks:
    """Builds additive masks `[1, 1, n, S]`, touching only what changed since the last of a shape.

    From one decode pass to the next the prefix grows by a few slots; everything before it stays
    visible and everything behind the tree stays hidden. So the work does not grow with the context.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        lowest = torch.tensor(torch.finfo(dtype).min, dtype=dtype)
        integers = torch.from_numpy(np.zeros((), dtype=_BITS[dtype])).dtype
        self._hidden = lowest.view(integers).numpy()[()]
        self._lookup = np.array([self._hidden, 0], dtype=_BITS[dtype])
        # By numbers of rows, all of one num_visible: the mask, the same memory as integers, and
        # for each lane up to where every row sees all and up to where any sees anything, as
        # last written.
        self._made: dict[tuple[int, ...], _Made] = {}
        self._num_visible = 0

    def build(
        self, rows: torch.Tensor, num_visible: int, counts: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """Return the mask [1, 1, n, num_visible] of one pass, valid until the next call.

        rows    [5, n] as in `Backend.forward`: of one prefix in each lane, or one causal chunk
        counts  rows of each lane, if there are several
        """
        shown, bits = rows.numpy()[3:]
        counts = counts or (len(bits),)
        if len(counts) == 1 < len(bits) and shown[0] != shown[-1]:
            return self._causal(shown, num_visible)
        if num_visible != self._num_visible or len(self._made) > _MOST_MADE:
            self._made.clear()
            self._num_visible = num_visible
        if counts not in self._made:
            self._made[counts] = self._allocate(counts, num_visible)
        mask, cells, written = self._made[counts]
        start = 0
        for number, count in enumerate(counts):
            of_lane = slice(start, start + count)
            written[number] = self._patch(
                cells[of_lane], written[number], int(shown[start]), bits[of_lane]
            )
            start += count
        return mask

    def _patch(
        self, cells: Any, written: tuple[int, int], prefix_len: int, bits: Slots
    ) -> tuple[int, int]:
        """Bring the rows of one lane up to date; returns up to where they are written."""
        any_bits = int(bits[0] if len(bits) == 1 else np.bitwise_or.reduce(bits)) & _ALL_BITS
        end = min(prefix_len + any_bits.bit_length(), cells.shape[1])
        # One row that sees all up to some slot is the usual step of a drafter.
        is_run = len(bits) == 1 and not any_bits & (any_bits + 1)
        seen_by_all = end if is_run else prefix_len
        if seen_by_all > written[0]:
            cells[:, written[0] : seen_by_all] = 0
        if end < written[1]:
            cells[:, end : written[1]] = self._hidden
        if end > seen_by_all:
            cells[:, seen_by_all:end] = self._lookup[_unpack(bits)[:, : end - seen_by_all]]
        return seen_by_all, end

    def _causal(self, shown: Slots, num_visible: int) -> torch.Tensor:
        visible = np.arange(num_visible) < shown[:, None]
        cells = self._lookup[visible.view(np.uint8)]
        return torch.from_numpy(cells).view(self._dtype)[None, None]

    def _allocate(self, counts: tuple[int, ...], num_visible: int) -> _Made:
        cells = np.full((sum(counts), num_visible), self._hidden, dtype=_BITS[self._dtype])
        mask = torch.from_numpy(cells).view(self._dtype)[None, None]
        return mask, cells, [(0, 0)] * len(counts)


def as_words(
    slots: Sequence[int], prefix_len: int, masks: Sequence[int] | None
) -> tuple[Sequence[int], Sequence[int]]:
    """Return what the rows of a pass see, in two integers each: a prefix, and 64 slots behind it.

    Row j sees the slots [0, words[0][j]), and behind them where bit t of words[1][j] is set; they
    are as signed integers of 64 bits hold them.

    slots       [n]: where each row's key and value go
    prefix_len  every row sees the slots [0, prefix_len)
    masks       [n]: row j also sees slot prefix_len + t where bit t of masks[j] is set; None is
                causal: row j sees [0, slots[j]]
    """
    if masks is None:
        return [slot + 1 for slot in slots], (0,) * len(slots)
    return (prefix_len,) * len(masks), [
        mask if mask <= _LARGEST else mask - (1 << MASK_BITS) for mask in masks
    ]


def from_words(words: torch.Tensor, num_visible: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask [1, 1, n, num_visible] that `words` [2, n] stand for, on their device.

    A few rows at a time: until it is done, an element takes twelve times what is left of it.
    """
    num_rows = words.shape[1]
    mask = torch.zeros(num_rows, num_visible, dtype=dtype, device=words.device)
    step = max(1, MOST_AT_ONCE // num_visible)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        mask[rows].masked_fill_(_is_hidden(words[:, rows], num_visible), torch.finfo(dtype).min)
    return mask[None, None]


def _is_hidden(words: torch.Tensor, num_visible: int) -> torch.Tensor:
    """Whether a row of `words` [2, n] does not see a slot [n, num_visible]."""
    shown, bits = words[:, :, None]
    behind = torch.arange(num_visible, device=words.device) - shown
    in_tree = (bits >> behind.clamp(0, MASK_BITS - 1)) & (behind < MASK_BITS)
    is_hidden: torch.Tensor = (behind >= 0) & (in_tree & 1 == 0)
    return is_hidden


def _unpack(bits: Slots) -> npt.NDArray[np.uint8]:
    """Return [n, 64], ones and zeros: element [j, t] is bit t of bits[j]."""
    words = bits.astype("<i8").view(np.uint8).reshape(len(bits), 8)
    return np.unpackbits(words, axis=1, bitorder="little")
