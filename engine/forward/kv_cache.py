"""Keys and values of all lanes in preallocated slots, as transformers' `Cache` sees them.

Owns the memory. Which slot holds what is decided elsewhere (`slots.py`); which slots a row may see
is the mask's business (`forward.py`). A slot that nobody may see still takes part in the arithmetic
with weight zero, so it must hold finite numbers (zero times NaN is NaN): the buffers start as
zeros, and what a row has written that was not finite is wiped (`not_finite.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from engine.device import send
from engine.layout.slots import LaneLayout

_Kind = tuple[int, int, torch.dtype]  # heads, dim, dtype


@dataclass(frozen=True, slots=True)
class Batch:
    """The slots of a pass of several lanes; tensors on the cache's device.

    written    [num_lanes * n] int64: where the rows go, lane by lane
    num_lanes  that the pass has
    picked     [num_lanes * num_visible] int64: the slots that it sees, which are copied out of the
               cache. None: the pass has all lanes there are, and sees them where they are
    """

    written: torch.Tensor
    num_lanes: int
    picked: torch.Tensor | None

    def update(self, there: torch.Tensor, states: torch.Tensor, num_visible: int) -> torch.Tensor:
        """Write the keys or values of a layer, and return those that the pass sees.

        there   [heads, slots, dim]: all that the layer holds
        states  [num_lanes, heads, n, dim]: those of the pass

        Returns [num_lanes, heads, num_visible, dim].
        """
        heads, _, dim = there.shape
        there.index_copy_(1, self.written, states.transpose(0, 1).reshape(heads, -1, dim))
        if self.picked is None:
            lanes = there.view(heads, self.num_lanes, -1, dim)[:, :, :num_visible]
        else:
            lanes = there.index_select(1, self.picked).view(heads, self.num_lanes, -1, dim)
        return lanes.transpose(0, 1)


class SlotCache(Cache):
    """All layers' keys and values, `capacity` slots each.

    Tensors of one shape share one buffer `[num, 1, heads, capacity, dim]`: in most models that is a
    single buffer with keys and values of layer l at 2 l and 2 l + 1, so a `Move` is one gather and
    one scatter. (Subclassing is what transformers asks of a cache.)
    """

    def __init__(self, model: Any, capacity: int, device: torch.device) -> None:
        shapes = _layer_shapes(model, device)
        kinds = [kind for layer in shapes for kind in layer]
        self.capacity = capacity
        self.buffers: dict[_Kind, torch.Tensor] = {}
        for heads, dim, dtype in dict.fromkeys(kinds):
            count = kinds.count((heads, dim, dtype))
            self.buffers[heads, dim, dtype] = torch.zeros(
                (count, 1, heads, capacity, dim), dtype=dtype, device=device
            )
        # What the layers must know of the pass that is running; set by `begin` or `begin_lanes`.
        self.num_visible = capacity
        self.first_slot: int | None = None
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        self.batch: Batch | None = None
        self._shown = 0, capacity  # the slots that layers have views of: the first, how many
        views = {kind: iter(buffer) for kind, buffer in self.buffers.items()}
        self._slot_layers = [
            SlotLayer(self, next(views[keys]), next(views[values])) for keys, values in shapes
        ]
        super().__init__(layers=[*self._slot_layers])

    def begin(
        self, slots: torch.Tensor, first_slot: int | None, lane_start: int, num_visible: int
    ) -> None:
        """Say what the coming pass writes and sees.

        slots        [n] int64 on the cache's device: where row j's key and value go
        first_slot   if slots are consecutive, the first of them (a copy is then enough); else None
        lane_start   the first slot that the pass's mask covers
        num_visible  number of slots that it covers
        """
        self.slots, self.first_slot, self.num_visible = slots, first_slot, num_visible
        self.batch = None
        if (lane_start, num_visible) != self._shown:
            self._shown = lane_start, num_visible
            for layer in self._slot_layers:
                layer.show(lane_start, num_visible)

    def begin_lanes(self, slots: torch.Tensor, num_visible: int, lanes: LaneLayout) -> None:
        """Say the same of a pass of several lanes, which are transformers' batch.

        Where the lanes begin is found on the device: a recording serves any lanes.

        slots        [lanes, n] int64 on the cache's device, as in `begin`
        num_visible  number of slots of each lane that the pass's mask covers, from its first on
        lanes        how the cache is divided
        """
        self.slots, self.first_slot, self.num_visible = slots[0], None, num_visible
        picked = None
        if len(slots) < lanes.count:
            first = first_slots(slots, lanes.num_slots)
            picked = (first[:, None] + torch.arange(num_visible, device=first.device)).view(-1)
        self.batch = Batch(slots.reshape(-1), len(slots), picked)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows of layer `layer_idx`; return views of the visible slots."""
        return self._slot_layers[layer_idx].update(key_states, value_states)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots `sources` to `targets` in every layer; all reads come first."""
        read, written = send(torch.tensor((sources, targets), dtype=torch.int64), self.slots.device)
        for buffer in self.buffers.values():
            buffer.index_copy_(3, written, buffer.index_select(3, read))

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy `length` slots from `source` on to those from `target` on, which are others."""
        for buffer in self.buffers.values():
            buffer.narrow(3, target, length).copy_(buffer.narrow(3, source, length))

    def wipe(self, first: int, length: int) -> None:
        """Write zeros to `length` slots from `first` on."""
        for buffer in self.buffers.values():
            buffer.narrow(3, first, length).zero_()

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the keys, then the values of each layer, [heads, capacity, dim]."""
        for layer in self._slot_layers:
            yield from layer.parts()


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's part of a `SlotCache`: views of its buffers."""

    is_compileable = False
    is_sliding = False

    def __init__(self, cache: SlotCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`keys` and `values` are `[1, heads, capacity, dim]` views."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache
        self.keys = self._keys = keys
        self.values = self._values = values
        self.is_initialized = True
        self.show(0, keys.shape[2])

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, [heads, capacity, dim]."""
        return self._keys[0], self._values[0]

    def show(self, start: int, num_visible: int) -> None:
        """Let `update` return the slots [start, start + num_visible) from now on."""
        seen = slice(start, start + num_visible)
        self._seen = self._keys[:, :, seen], self._values[:, :, seen]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, heads, n, dim]` rows at the slots of the pass; return the visible slots.

        Of a pass of lanes both are `[lanes, heads, n, dim]`.
        """
        if (batch := self.cache.batch) is not None:
            num_visible = self.cache.num_visible
            keys = batch.update(self._keys[0], key_states, num_visible)
            return keys, batch.update(self._values[0], value_states, num_visible)
        first = self.cache.first_slot
        if first is None:
            self._keys.index_copy_(2, self.cache.slots, key_states)
            self._values.index_copy_(2, self.cache.slots, value_states)
        else:
            num_rows = key_states.shape[2]
            self._keys.narrow(2, first, num_rows).copy_(key_states)
            self._values.narrow(2, first, num_rows).copy_(value_states)
        return self._seen

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers exist from the start."""

    def get_seq_length(self) -> int:
        """Slots before the rows of the pass, for models that ask (positions are given)."""
        return max(self.cache.num_visible - int(self.cache.slots.shape[0]), 0)

    def get_max_length(self) -> int:
        """Capacity in slots."""
        return self.cache.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(slots that a mask covers, offset of the first)."""
        del query_length
        return self.cache.num_visible, 0


def first_slots(slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return where the lanes begin that rows are written to, [lanes] int64 on their device.

    slots      [lanes, n] int64: of each row
    num_slots  of a lane
    """
    return slots[:, 0].div(num_slots, rounding_mode="floor") * num_slots


def first_not_finite(parts: Iterable[torch.Tensor], first: int, length: int) -> int | None:
    """Return the first of some slots with NaN or infinity in the first part that has any.

    parts  [heads, slots, dim] each, lower layers first
    first, length  which slots

    The result is number of the part * length + slot (from `first` on), so that of the results of
    several ranks the lowest is the first.
    """
    for number, part in enumerate(parts):
        is_bad = part.narrow(1, first, length).isfinite().logical_not_().amax(dim=(0, 2))
        if bool(is_bad.any()):
            return number * length + int(is_bad.nonzero()[0, 0])
    return None


def slot_bytes(model: Any, device: torch.device) -> int:
    """Return how much memory one token's keys and values take, over all layers."""
    shapes = _layer_shapes(model, device)
    return sum(heads * dim * dtype.itemsize for layer in shapes for heads, dim, dtype in layer)


def _layer_shapes(model: Any, device: torch.device) -> list[tuple[_Kind, _Kind]]:
    """Return (keys' kind, values' kind) per layer, found by running one token.

    Configurations do not tell: Falcon, for one, caches its shared keys once per query head.
    """
    cache = DynamicCache()
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    with torch.inference_mode():
        model(token, past_key_values=cache, use_cache=True)
    layers: list[Any] = cache.layers
    return [(_kind_of(layer.keys), _kind_of(layer.values)) for layer in layers]


def _kind_of(rows: torch.Tensor) -> _Kind:
    return rows.shape[1], rows.shape[3], rows.dtype
