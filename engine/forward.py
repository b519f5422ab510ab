"""The one forward signature of the engine, and its reference backend: unmodified transformers.

Owns the attention mask. A backend is anything with `Backend`'s methods; callers never see whether
it is eager, fused, compiled or captured. It knows rows and slots, no session and no tree.
"""

import inspect
from typing import Any, Protocol

import numpy as np
import torch

from engine.kv_cache import SlotCache
from engine.model import LoadedModel
from engine.slots import Move

# A mask is added to the attention scores. Its "hidden" is the type's lowest finite number, as in
# transformers: it becomes exactly zero in the softmax, and a row that sees nothing is no NaN.
_BITS = {torch.float32: np.int32, torch.bfloat16: np.int16, torch.float16: np.int16}


class Backend(Protocol):
    """One model with one cache on one device.

    name  how it is called in messages and options
    """

    name: str

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        prefix_len: int,
        tree_mask: torch.Tensor | None,
        *,
        num_visible: int,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run n rows, write their keys and values, return logits.

        ids          [n] int64, CPU
        positions    [n] int64, CPU: position of each row on its path
        slots        [n] int64, CPU: where each row's key and value go
        prefix_len   every row sees the slots [0, prefix_len)
        tree_mask    [n, T] bool, CPU: row j also sees slot prefix_len + t where [j, t]; None is
                     causal: row j sees [0, slots[j]]
        num_visible  slots [0, num_visible) take part; it covers all that any row sees
        keep         [k] int64, CPU: rows whose logits are wanted; None is all

        Returns [k or n, V] in the model's dtype, on the model's device.
        """

    def move(self, move: Move) -> None:
        """Copy cache slots, all reads before any write."""

    def take_over(self, *, timed: bool = True) -> None:
        """Lay the weights out as suits this backend; the model itself may not run afterwards.

        timed  clocks may decide how: faster, but every process may then have its own last bits
        """


class HuggingFaceBackend:
    """Any transformers causal language model that takes a four-dimensional mask."""

    name = "reference"

    def __init__(self, loaded: LoadedModel, num_slots: int) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self.cache = SlotCache(loaded.model, num_slots, loaded.device)
        self._masks = Masks(loaded.dtype)
        parameters = inspect.signature(loaded.model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        prefix_len: int,
        tree_mask: torch.Tensor | None,
        *,
        num_visible: int,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.forward`."""
        mask = self._masks.build(slots, prefix_len, tree_mask, num_visible)
        first_slot = _first_of_run(slots) if self._device.type == "cpu" else None
        ids, positions, slots, mask = self._to_device(ids, positions, slots, mask)
        self.cache.begin(slots, first_slot, num_visible)
        options: dict[str, Any] = {}
        if keep is not None and self._keeps_logits:
            options["logits_to_keep"] = keep.to(self._device)
        with torch.inference_mode():
            logits: torch.Tensor = self._model(
                ids[None],
                attention_mask=mask,
                position_ids=positions[None],
                past_key_values=self.cache,
                use_cache=True,
                **options,
            ).logits[0]
            return logits if keep is None or options else logits[keep.to(self._device)]

    def move(self, move: Move) -> None:
        """See `Backend.move`."""
        with torch.inference_mode():
            self.cache.move(move)

    def take_over(self, *, timed: bool = True) -> None:
        """Nothing to do: it runs the model as it is."""
        del timed

    def _to_device(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._device.type == "cpu":
            return tensors
        return tuple(tensor.to(self._device, non_blocking=True) for tensor in tensors)


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


def _first_of_run(slots: torch.Tensor) -> int | None:
    """Return slots[0] if the slots are consecutive and ascending, else None."""
    array = slots.numpy()
    first = int(array[0])
    if int(array[-1]) - first != len(array) - 1:
        return None
    return first if len(array) < 3 or bool((np.diff(array) == 1).all()) else None
