"""What the rows of a pass see, as numbers that are added to their attention scores."""

from typing import Any

import numpy as np
import torch

# A mask is added to the attention scores. Its "hidden" is the type's lowest finite number, as in
# transformers: it becomes exactly zero in the softmax, and a row that sees nothing is no NaN.
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
        # and [prefix_len, end of the tree region] as last written.
        self._made: dict[int, tuple[torch.Tensor, Any, list[int]]] = {}
        self._num_visible = 0

    def build(
        self, slots: torch.Tensor, prefix_len: int, tree_mask: torch.Tensor | None, num_visible: int
    ) -> torch.Tensor:
        """Return the mask of one pass, valid until the next call. Arguments as in `Backend`."""
        if tree_mask is None:
            visible = np.arange(num_visible) <= slots.numpy()[:, None]
            return torch.from_numpy(self._lookup[visible.view(np.uint8)]).view(self._dtype)[
                None, None
            ]
        if num_visible != self._num_visible:
            self._made.clear()
            self._num_visible = num_visible
        num_rows = len(slots)
        if num_rows not in self._made:
            self._made[num_rows] = self._allocate(num_rows, num_visible)
        mask, cells, written = self._made[num_rows]
        end = min(prefix_len + tree_mask.shape[1], num_visible)
        if prefix_len > written[0]:
            cells[:, written[0] : prefix_len] = 0
        if end < written[1]:
            cells[:, end : written[1]] = self._hidden
        tree = tree_mask.numpy().view(np.uint8)[:, : end - prefix_len]
        cells[:, prefix_len:end] = self._lookup[tree]
        written[0], written[1] = prefix_len, end
        return mask

    def _allocate(self, num_rows: int, num_visible: int) -> tuple[torch.Tensor, Any, list[int]]:
        cells = np.full((num_rows, num_visible), self._hidden, dtype=_BITS[self._dtype])
        return torch.from_numpy(cells).view(self._dtype)[None, None], cells, [0, 0]
