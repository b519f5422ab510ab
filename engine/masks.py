"""What the rows of a pass see, as numbers that are added to their attention scores."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Slots = npt.NDArray[np.int64]

# A mask is added to the attention scores. Its "hidden" is the type's lowest finite number, as in
# transformers: it becomes exactly zero in the softmax, and a row that sees nothing is no NaN.
MASK_BITS = 64
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

    def build(
        self, slots: Slots, prefix_len: int, masks: Sequence[int] | None, num_visible: int
    ) -> torch.Tensor:
        """Return the mask [1, 1, n, num_visible] of one pass, valid until the next call.

        slots       [n]: where each row's key and value go
        prefix_len  every row sees the slots [0, prefix_len)
        masks       [n]: row j also sees slot prefix_len + t where bit t of masks[j] is set; None is
                    causal: row j sees [0, slots[j]]
        """
        if masks is None:
            visible = np.arange(num_visible) <= slots[:, None]
            return torch.from_numpy(self._lookup[visible.view(np.uint8)]).view(self._dtype)[
                None, None
            ]
        if num_visible != self._num_visible:
            self._made.clear()
            self._num_visible = num_visible
        num_rows = len(masks)
        if num_rows not in self._made:
            self._made[num_rows] = self._allocate(num_rows, num_visible)
        mask, cells, written = self._made[num_rows]
        end = min(prefix_len + max(masks).bit_length(), num_visible)
        # One row that sees all up to some slot is the usual step of a drafter.
        is_run = num_rows == 1 and not masks[0] & (masks[0] + 1)
        shown = end if is_run else prefix_len
        if shown > written[0]:
            cells[:, written[0] : shown] = 0
        if end < written[1]:
            cells[:, end : written[1]] = self._hidden
        if end > shown:
            cells[:, shown:end] = self._lookup[unpack_masks(masks)[:, : end - shown]]
        written[0], written[1] = shown, end
        return mask

    def _allocate(self, num_rows: int, num_visible: int) -> tuple[torch.Tensor, Any, list[int]]:
        cells = np.full((num_rows, num_visible), self._hidden, dtype=_BITS[self._dtype])
        return torch.from_numpy(cells).view(self._dtype)[None, None], cells, [0, 0]


def as_words(slots: Slots, prefix_len: int, masks: Sequence[int] | None) -> torch.Tensor:
    """Return what `Masks.build` takes as integers [2, n] int64, from which a device can make it.

    Row j sees the slots [0, words[0, j]), and behind them where bit t of words[1, j] is set.
    """
    if masks is None:
        return torch.from_numpy(np.stack((slots + 1, np.zeros_like(slots))))
    bits = np.array(masks, dtype=np.uint64).view(np.int64)
    return torch.from_numpy(np.stack((np.full_like(bits, prefix_len), bits)))


def from_words(words: torch.Tensor, num_visible: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask [1, 1, n, num_visible] that `words` [2, n] stand for, on their device."""
    shown, bits = words[:, :, None]
    behind = torch.arange(num_visible, device=words.device) - shown
    in_tree = (bits >> behind.clamp(0, MASK_BITS - 1)) & (behind < MASK_BITS)
    is_hidden = (behind >= 0) & (in_tree & 1 == 0)
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=words.device)
    return mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[None, None]


def unpack_masks(masks: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Return [n, 64], ones and zeros: element [j, t] is bit t of masks[j]."""
    words = np.array(masks, dtype="<u8")
    return np.unpackbits(words.view(np.uint8).reshape(len(words), 8), axis=1, bitorder="little")
