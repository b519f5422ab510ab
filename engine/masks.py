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
_BITS = {torch.float32: np.int32, torch.bfloat16: np.int16, torch.float16: np.int16}


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
        # By number of rows, all of one num_visible: the mask, the same memory as integers,
        # and up to where every row sees all and up to where any sees anything, as last written.
        self._made: dict[int, tuple[torch.Tensor, Any, list[int]]] = {}
        self._num_visible = 0

    def build(self, words: torch.Tensor, num_visible: int) -> torch.Tensor:
        """Return the mask [1, 1, n, num_visible] of one pass, valid until the next call.

        words  [2, n] int64 on the CPU, as from `as_words`: rows of one prefix, or a causal chunk
        """
        shown, bits = words.numpy()
        if shown[0] != shown[-1]:
            return self._causal(shown, num_visible)
        if num_visible != self._num_visible:
            self._made.clear()
            self._num_visible = num_visible
        num_rows = len(bits)
        if num_rows not in self._made:
            self._made[num_rows] = self._allocate(num_rows, num_visible)
        mask, cells, written = self._made[num_rows]
        prefix_len, any_bits = int(shown[0]), int(np.bitwise_or.reduce(bits)) & _ALL_BITS
        end = min(prefix_len + any_bits.bit_length(), num_visible)
        # One row that sees all up to some slot is the usual step of a drafter.
        is_run = num_rows == 1 and not any_bits & (any_bits + 1)
        seen_by_all = end if is_run else prefix_len
        if seen_by_all > written[0]:
            cells[:, written[0] : seen_by_all] = 0
        if end < written[1]:
            cells[:, end : written[1]] = self._hidden
        if end > seen_by_all:
            cells[:, seen_by_all:end] = self._lookup[_unpack(bits)[:, : end - seen_by_all]]
        written[0], written[1] = seen_by_all, end
        return mask

    def _causal(self, shown: Slots, num_visible: int) -> torch.Tensor:
        visible = np.arange(num_visible) < shown[:, None]
        cells = self._lookup[visible.view(np.uint8)]
        return torch.from_numpy(cells).view(self._dtype)[None, None]

    def _allocate(self, num_rows: int, num_visible: int) -> tuple[torch.Tensor, Any, list[int]]:
        cells = np.full((num_rows, num_visible), self._hidden, dtype=_BITS[self._dtype])
        return torch.from_numpy(cells).view(self._dtype)[None, None], cells, [0, 0]


def as_words(slots: Slots, prefix_len: int, masks: Sequence[int] | None) -> Slots:
    """Return what the rows of a pass see as integers [2, n]: a prefix, and 64 slots behind it.

    Row j sees the slots [0, words[0, j]), and behind them where bit t of words[1, j] is set.

    slots       [n]: where each row's key and value go
    prefix_len  every row sees the slots [0, prefix_len)
    masks       [n]: row j also sees slot prefix_len + t where bit t of masks[j] is set; None is
                causal: row j sees [0, slots[j]]
    """
    words = np.zeros((2, len(slots)), dtype=np.int64)
    if masks is None:
        words[0] = slots + 1
    else:
        words[0] = prefix_len
        words[1] = np.array(masks, dtype=np.uint64).view(np.int64)
    return words


def from_words(words: torch.Tensor, num_visible: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask [1, 1, n, num_visible] that `words` [2, n] stand for, on their device."""
    shown, bits = words[:, :, None]
    behind = torch.arange(num_visible, device=words.device) - shown
    in_tree = (bits >> behind.clamp(0, MASK_BITS - 1)) & (behind < MASK_BITS)
    is_hidden = (behind >= 0) & (in_tree & 1 == 0)
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=words.device)
    return mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[None, None]


def _unpack(bits: Slots) -> npt.NDArray[np.uint8]:
    """Return [n, 64], ones and zeros: element [j, t] is bit t of bits[j]."""
    words = bits.astype("<i8").view(np.uint8).reshape(len(bits), 8)
    return np.unpackbits(words, axis=1, bitorder="little")
