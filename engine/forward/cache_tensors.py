"""KV cache of all lanes in preallocated slots, with the interface of transformers' `Cache`.

Owns the memory, and does nothing when a text rolls back: which slot holds which token is decided in
`engine/layout/slots.py` (`SlotMap.advance`, `truncate`), and which slots a row sees by the mask
(`masks.py`). A hidden slot still takes part in the arithmetic with
weight zero, so it must hold finite numbers (zero times NaN is NaN): the buffers start as zeros, and
rows that are not finite are wiped (`not_finite.py`)."""

import inspect
import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from engine.device import send
from engine.layout.slots import LaneLayout

STATE_STEP = 64  # tokens from one border to the next, at which states are kept
_Kind = tuple[int, int, torch.dtype]  # heads, dim, dtype
_SHAPES: WeakKeyDictionary[Any, list[tuple[_Kind, _Kind]]] = WeakKeyDictionary()  # by model


@dataclass(frozen=True, slots=True)
class Batch:
    """The slots that a pass of several lanes writes and sees; tensors on the cache's device.

    written    [num_lanes * n] int64: the slots that the rows are written to, lane by lane
    num_lanes  number of lanes of the pass
    picked     [num_lanes * num_visible] int64: the slots that the pass sees, which are copied out
               of the cache. None: the pass has all lanes of the cache, and needs no copy
    """

    written: torch.Tensor
    num_lanes: int
    picked: torch.Tensor | None

    def update(self, there: torch.Tensor, states: torch.Tensor, num_visible: int) -> torch.Tensor:
        """Write a pass's keys (or values) of one layer; return those that the pass sees.

        there   [heads, slots, dim]: the layer's keys (or values) in the cache
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
    """KV cache of all layers, `capacity` slots each; passed to transformers' models.

    Tensors of one shape share one buffer [num, 1, heads, capacity, dim]: in most models a single
    buffer with the keys and values of layer l at 2 l and 2 l + 1, so that a `Move` is one gather
    and one scatter. (It is a subclass because transformers requires that.)
    """

    def __init__(
        self,
        model: Any,
        capacity: int,
        device: torch.device,
        of_layers: Sequence[int] = (),
        num_before: int = 0,
    ) -> None:
        """Allocate the buffers.

        of_layers  per layer, which of a pass's `lengths` it sees (`begin`); (): the first
        num_before  how many tokens before a row its layers ask for (`before`)
        """
        shapes = _layer_shapes(model, device)
        kinds = [kind for layer in shapes for kind in layer]
        self.capacity = capacity
        self.buffers: dict[_Kind, torch.Tensor] = {}
        for heads, dim, dtype in dict.fromkeys(kinds):
            count = kinds.count((heads, dim, dtype))
            self.buffers[heads, dim, dtype] = zeros((count, 1, heads, capacity, dim), dtype, device)
        # Properties of the running pass that the layers use; set by `begin` or `begin_lanes`.
        self.num_visible = capacity
        self.first_slot: int | None = None
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        self.batch: Batch | None = None
        self._start = 0  # the first slot that a pass of one lane sees
        # The position of the token in each slot; per row of the running pass, where the tokens
        # before it lie, and whether there are any (`see`).
        self._num_before = num_before
        size = capacity if num_before else 0
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._before = self._are_before = self._positions
        # Of layers with a state (`running_states.py`), by a number of the layer and lane: the state
        # of the text behind so many tokens. What a pass of one lane is, as `note` was told.
        self.states: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        self.committed = self.first = self.count = self._longest = 0
        self.is_chain = False
        # What the layers' views show: the slots before `end`, as many as `lengths` (`begin`).
        self._shown: tuple[int, tuple[int, ...]] = capacity, (capacity,)
        # Upper layers of some families have no keys of their own, but those of a layer below; and
        # behind all layers are those that are beside attention (`more_layers.py`).
        self._of_layers = (*of_layers, *(0,) * (len(shapes) - len(of_layers)))[: len(shapes)]
        views = {kind: iter(buffer) for kind, buffer in self.buffers.items()}
        self._slot_layers = [
            SlotLayer(self, next(views[keys]), next(views[values])) for keys, values in shapes
        ]
        super().__init__(layers=[*self._slot_layers])

    def begin(
        self,
        slots: torch.Tensor,
        first_slot: int | None,
        end: int,
        lengths: tuple[int, ...],
    ) -> None:
        """Set which slots the next pass writes and sees; for a pass of one lane.

        slots        [n] int64 on the cache's device: the slot that row j is written to
        first_slot   if the slots are consecutive, the first one (a plain copy then suffices); else
                     None
        end          the slot after the last one that the pass's masks cover
        lengths      per kind of layer, the number of slots that its mask covers
        """
        self.slots, self.first_slot, self.num_visible = slots, first_slot, max(lengths)
        self.batch, self._start = None, end - self.num_visible
        if (end, lengths) != self._shown:
            self._shown = end, lengths
            for layer, kind in zip(self._slot_layers, self._of_layers, strict=True):
                layer.show(end - lengths[kind], lengths[kind])

    def begin_lanes(self, slots: torch.Tensor, num_visible: int, lanes: LaneLayout) -> None:
        """Set which slots the next pass writes and sees; for a pass of several lanes.

        The lanes are transformers' batch dimension. Where they begin is computed on the device, so
        that one recording (CUDA graph) serves any lanes.

        slots        [lanes, n] int64 on the cache's device: the slots that rows are written to
        num_visible  number of slots of each lane that the pass's mask covers, from its first on
        lanes        how the cache is divided
        """
        self.slots, self.first_slot, self.num_visible = slots[0], None, num_visible
        picked = None
        if len(slots) < lanes.count:
            first = first_slots(slots, lanes.num_slots)
            picked = (first[:, None] + torch.arange(num_visible, device=first.device)).view(-1)
        self.batch = Batch(slots.reshape(-1), len(slots), picked)

    def see(self, positions: torch.Tensor, mask: torch.Tensor) -> None:
        """Find the tokens before each row of the pass, on its path; call it after `begin`.

        Recordings can hold it: nothing waits for the device.

        positions  [lanes, n] int64: of the rows
        mask       [lanes, 1, n, num_visible]: added to the scores, 0 for what a row sees
        """
        if not self._num_before:
            return
        batch, num_visible = self.batch, self.num_visible
        written = self.slots if batch is None else batch.written
        self._positions.index_copy_(0, written, positions.reshape(-1))
        if batch is None:
            there = self._positions.narrow(0, self._start, num_visible)[None]
        elif batch.picked is None:
            there = self._positions.view(batch.num_lanes, -1)[:, :num_visible]
        else:
            there = self._positions.index_select(0, batch.picked).view(batch.num_lanes, -1)
        # Column d of a row: where the token d places before it lies. What is hidden goes to column
        # 0, and what is farther back to the last, which nobody reads.
        count = max(self._num_before, self._longest) + 1
        back = (positions[:, :, None] - there[:, None]).masked_fill_(mask[:, 0] < -1, 0)
        back = back.clamp_(0, count)
        at = torch.arange(num_visible, device=back.device).expand_as(back)
        self._before = back.new_zeros(*back.shape[:2], count + 1).scatter_(2, back, at)
        self._are_before = torch.zeros_like(self._before, dtype=torch.bool)
        self._are_before.scatter_(2, back, value=True)

    def note(self, first: int, committed: int, longest: int, count: int, *, is_chain: bool) -> None:
        """Note what the next pass of one lane is, for layers with a state; call it after `begin`.

        first      the first slot of the lane that is written to
        committed  tokens of the text that all rows see and that are in the cache
        longest    number of the last position that it has, plus 1
        count      number of rows; those behind are padding
        is_chain   True: the rows follow one another from `first` on
        """
        self.first, self.count, self.is_chain = first, count, is_chain
        self.committed = committed
        self._longest = 0 if is_chain else longest - committed
        for key, (behind, _) in list(self.states.items()):
            if key[1] == self.lane and first < behind:
                del self.states[key]

    @property
    def lane(self) -> int:
        """Return the first slot of the lane of a pass of one lane."""
        return self._start

    @property
    def positions(self) -> torch.Tensor:
        """Return the positions [n] int64 of the rows of a pass of one lane."""
        return self._positions[self.slots]

    @property
    def path(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, of a pass of one lane, each row's tokens behind the committed ones, in order.

        They are (slots of the lane [n, longest], whether there is a token there), the row last.
        """
        index, are_there = self._before[0], self._are_before[0]
        index, are_there = index[:, : self._longest].clone(), are_there[:, : self._longest].clone()
        # A row of padding lies behind all that is seen, and nobody reads what it says.
        index[:, 0] = (self.slots - self._start).clamp_(max=self.num_visible - 1)
        are_there[:, 0] = True
        back = torch.arange(self._longest, device=index.device)
        are_there &= self.positions[:, None] - back >= self.committed
        return index.flip(1), are_there.flip(1)

    def before(self, seen: torch.Tensor) -> torch.Tensor:
        """Return what was kept of the tokens before each row [lanes, n, num_before, dim], or zeros.

        The nearest token comes first.

        seen  [lanes, num_visible, dim]: what was kept of all tokens that the pass sees
        """
        near = slice(1, self._num_before + 1)
        where, are_there = self._before[:, :, near], self._are_before[:, :, near]
        index = where.flatten(1)[..., None].expand(-1, -1, seen.shape[-1])
        found = seen.gather(1, index).view(*where.shape, -1)
        return found.masked_fill_(are_there.logical_not()[..., None], 0)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values of the pass; return (keys, values) of visible slots."""
        return self._slot_layers[layer_idx].update(key_states, value_states)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots `sources` to `targets` in every layer; all reads come first."""
        pair = torch.tensor((sources, targets), dtype=torch.int64)
        self.move_there(*send(pair, self.slots.device))

    def move_there(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots as `move` does; [n] int64, on the cache's device."""
        for buffer in self.buffers.values():
            buffer.index_copy_(3, targets, buffer.index_select(3, sources))
        if self._num_before:
            self._positions.index_copy_(0, targets, self._positions.index_select(0, sources))

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy `length` slots starting at `source` to those starting at `target`; no overlap."""
        for buffer in self.buffers.values():
            buffer.narrow(3, target, length).copy_(buffer.narrow(3, source, length))
        if self._num_before:
            there = self._positions.narrow(0, target, length)
            there.copy_(self._positions.narrow(0, source, length))
            self._hand_on(source, target, length)

    def wipe(self, first: int, length: int) -> None:
        """Write zeros to `length` slots, starting at slot `first`."""
        for buffer in self.buffers.values():
            buffer.narrow(3, first, length).zero_()
        wiped = range(first, first + length)
        for key, (behind, _) in list(self.states.items()):
            if key[1] + behind > first and key[1] < wiped.stop:
                del self.states[key]

    def _hand_on(self, source: int, target: int, length: int) -> None:
        """Give the lane that begins at `target` the states of that at `source`, where they fit."""
        self.states = {key: one for key, one in self.states.items() if key[1] != target}
        for (layer, lane), (behind, state) in list(self.states.items()):
            if lane == source and behind <= length:
                self.states[layer, target] = behind, state

    def layers_parts(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of a layer, [heads, capacity, dim] each."""
        return self._slot_layers[layer].parts()

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the keys, then the values of each layer that has any, [heads, capacity, dim]."""
        for layer in self._slot_layers:
            yield from (part for part in layer.parts() if part.numel())


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's part of a `SlotCache`: views of its buffers."""

    is_compileable = False
    is_sliding = False

    def __init__(self, cache: SlotCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make a layer of views `keys` and `values` [1, heads, capacity, dim] of the buffers."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache
        self.keys = self._keys = keys
        self.values = self._values = values
        self.is_initialized = True
        self.show(0, keys.shape[2])

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (keys, values) of all slots, [heads, capacity, dim] each."""
        return self._keys[0], self._values[0]

    def show(self, start: int, num_visible: int) -> None:
        """Let `update` return the slots [start, start + num_visible) from now on."""
        seen = slice(start, start + num_visible)
        self._seen = self._keys[:, :, seen], self._values[:, :, seen]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the pass's keys and values; return (keys, values) of the visible slots.

        All are [1, heads, n or num_visible, dim]; in a pass of several lanes [lanes, heads, ...].
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
        """Do nothing: the buffers exist from the start."""

    def get_seq_length(self) -> int:
        """Return the number of slots before the pass's rows, for models that ask for it."""
        return max(self.cache.num_visible - int(self.cache.slots.shape[0]), 0)

    def get_max_length(self) -> int:
        """Return the capacity of the cache in slots."""
        return self.cache.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of slots that a mask covers, offset of the first one)."""
        del query_length
        return self.cache.num_visible, 0


def first_slots(slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return the first slot of each lane of a pass, [lanes] int64 on the device of `slots`.

    slots      [lanes, n] int64: the slots of the cache that the rows are written to
    num_slots  number of slots of a lane
    """
    return slots[:, 0].div(num_slots, rounding_mode="floor") * num_slots


def first_not_finite(parts: Iterable[torch.Tensor], first: int, length: int) -> int | None:
    """Return where NaN or infinity occurs first: part index * length + slot; None if nowhere.

    The part is the lowest one with such a number, and the slot the lowest one in it, counted from
    `first`. So the lowest of several ranks' results is the first of all.

    parts  keys or values [heads, slots, dim] of each layer, lower layers first
    first, length  the slots to look at: [first, first + length)
    """
    for number, part in enumerate(parts):
        is_bad = part.narrow(1, first, length).isfinite().logical_not_().amax(dim=(0, 2))
        if bool(is_bad.any()):
            return number * length + int(is_bad.nonzero()[0, 0])
    return None


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros which on a CPU takes memory only where it is written to.

    Raises RuntimeError, as torch does, if there is not enough memory.

    torch.zeros writes every page, so that a cache takes the memory of the longest texts at once.
    Pages are not merged into large ones: one token would take megabytes in every layer and head.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(*shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"can't allocate memory: {size} bytes") from error
    with suppress(OSError):  # a system without large pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def slot_bytes(model: Any, device: torch.device) -> int:
    """Return the bytes that one token's keys and values take, over all layers."""
    shapes = _layer_shapes(model, device)
    return sum(heads * dim * dtype.itemsize for layer in shapes for heads, dim, dtype in layer)


def _layer_shapes(model: Any, device: torch.device) -> list[tuple[_Kind, _Kind]]:
    """Return, per layer, (heads, dim, dtype) of its keys and of its values, by running one token.

    A configuration does not tell: Falcon, for example, caches its shared keys once per query head.
    A model is run once, and its shapes are kept while it lives.
    """
    if model not in _SHAPES:
        _SHAPES[model] = _shapes_by_running(model, device)
    return _SHAPES[model]


def cache_arguments(model: Any, cache: Cache) -> dict[str, Any]:
    """Return the arguments by which a model of transformers takes a cache of ours."""
    called = getattr(model, "forward", model)
    if "past_key_values" not in inspect.signature(called).parameters:
        return {"cache_params": cache, "use_cache": True}  # it has no attention
    # MiniMax refuses other caches than its own, but where it is not asked to return one.
    is_minimax = type(model).__name__ == "MiniMaxForCausalLM"
    return {"past_key_values": cache, "use_cache": not is_minimax}


class ShapeCache(DynamicCache):
    """The cache of the one token that is run to learn shapes: layers use it as a `SlotCache`."""


def _shapes_by_running(model: Any, device: torch.device) -> list[tuple[_Kind, _Kind]]:
    cache = ShapeCache()
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    with torch.inference_mode():
        model(token, **cache_arguments(model, cache))
    layers: list[Any] = cache.layers
    return [(_kind_of(layer.keys), _kind_of(layer.values)) for layer in layers]


def _kind_of(rows: torch.Tensor | None) -> _Kind:
    """Return (heads, dim, dtype) of keys or values [1, heads, n, dim].

    None: the layer keeps nothing here, as one of a feed-forward alone.
    """
    if rows is None:
        return 0, 0, torch.float32
    return rows.shape[1], rows.shape[3], rows.dtype
