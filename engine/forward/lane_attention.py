"""Attention of a pass over one or several lanes (texts) of a cache.

Owns the views of the cache and the layout of the queries, which are made once for each shape of a
pass. Lanes with equally many rows at equal distances share one call; else each lane has a call of
its own. Either way a row sees the keys and values of its own lane only. Knows no model. On a CPU
where our own attention is there (`cpu_attention.py`), passes do not need this.

Recorded passes (`graphs.py`) find their lanes while they run: where a lane begins is a number on
the device. They write to memory of their own (`Room`), which is never freed, because a recording
writes there as long as it exists.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

from engine.errors import ModelError
from engine.forward.cache_tensors import first_slots
from engine.forward.flex_attention import FlexAttention
from engine.forward.forward import Shape, Spans
from engine.forward.masks import words_of
from engine.forward.operators import (
    side_by_side,
)
from engine.forward.split_attention import SplitAttention, Visible
from engine.forward.split_kernel import SplitKernel
from engine.layout.attention_windows import FULL, LayerKinds
from engine.layout.slots import NUM_TREE_SLOTS, LaneLayout, Span, is_grid

logger = logging.getLogger(__name__)

Seen = tuple[torch.Tensor, torch.Tensor]
"""(keys, values) that a call of attention sees, views of one layer's cache: [lanes, kv_heads,
num_visible, dim] each; for attention that is split over the keys [1, kv_heads, slots, dim], with
the slots of all lanes"""

LayerPlan = tuple[Sequence[Seen], Sequence[torch.Tensor | Visible]]
"""What the calls of attention of one layer see: the keys and values of each, and its mask [lanes,
1, n * group (1 if n is 1), slots seen], added to the scores; for attention that is split over the
keys, a `Visible` in place of a mask"""

_MOST_MADE = 64


@dataclass(frozen=True, slots=True)
class Projections:
    """Memory for the queries, keys and values of n rows, with views of it.

    The views are made once, because making a view costs as much time as an operator.

    heads     [n, (heads + 2 kv_heads) * dim]: queries, keys and values
    turned    [n, heads + kv_heads, dim]: queries and keys
    halves    the second and the first half of `turned`, along dim
    swapped   memory of its own, shaped like `turned`
    written   [2 kv_heads, n, dim]: keys and values
    apart     [n, kv_heads, group, dim]: queries
    """

    heads: torch.Tensor
    turned: torch.Tensor
    halves: tuple[torch.Tensor, torch.Tensor]
    swapped: torch.Tensor
    written: torch.Tensor
    apart: torch.Tensor


@dataclass(frozen=True, slots=True)
class Look:
    """The queries of one call of attention: n rows in each of some lanes.

    query   [lanes, kv_heads, n, group, dim]: a view of the pass's queries
    beside  [lanes, kv_heads, n * group, dim]: the queries in the layout that attention takes, with
            the heads of a group as rows; for one row per lane it is the memory of `query`
    apart   `beside` with the dimensions of `query`
    """

    num_lanes: int
    num_rows: int
    query: torch.Tensor
    beside: torch.Tensor
    apart: torch.Tensor

    def gathered(self) -> torch.Tensor:
        """Return `beside`, filled with the pass's queries (copied if there are several rows)."""
        if self.num_rows > 1:
            self.apart.copy_(self.query)
        return self.beside


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of recorded passes of one shape: projections, and the queries of the only call."""

    made: Projections
    look: Look


@dataclass(frozen=True, slots=True)
class Plan:
    """The calls of attention of a pass, in every layer.

    looks   the queries of each call
    layers  per layer, what the calls see
    picked  [lanes * num_visible] int64: slots to copy out of a layer's cache for the only call;
            then `layers` holds each layer's whole cache, twice. None: nothing is copied
    """

    looks: Sequence[Look]
    layers: Iterable[LayerPlan]
    picked: torch.Tensor | None = None


class LaneAttention:
    """Plans and runs a model's attention over a cache [layers, 2 kv_heads, lanes.total, dim]."""

    def __init__(
        self,
        cache: torch.Tensor,
        lanes: LaneLayout,
        group: int,
        scale: float,
        kinds: LayerKinds = FULL,
    ) -> None:
        """Take the cache.

        cache   [layers, 2 kv_heads, lanes.total, dim]: keys, then values
        group   number of query heads that share a key head
        scale   factor of the scores
        kinds   what the layers see of a text
        """
        self._kinds = kinds
        self._layers = cache.unbind()
        self._lanes = lanes
        self._group = group
        self._scale = scale
        self._projections: dict[int, Projections] = {}  # by number of rows
        # (rows of each lane, True if one call serves all lanes) -> the queries of each call.
        self._looks: dict[tuple[tuple[int, ...], bool], list[Look]] = {}
        # (first slot, number of lanes, their distance, slots of each) -> the views of each layer.
        self._seen: dict[tuple[int, int, int, int], list[Seen]] = {}
        self._rooms: dict[Shape, Room] = {}  # memory of recorded passes, never freed
        is_on_cpu = cache.device.type == "cpu"
        # Attention split over the keys, the better kinds first; one that cannot run is taken away.
        self._splits: list[SplitAttention] = [
            kind(lanes.num_slots, group, num_lanes=lanes.count, kinds=kinds)
            for kind in ((FlexAttention,) if is_on_cpu else (SplitKernel, FlexAttention))
        ]

    def make_rooms(self, shapes: Iterable[Shape]) -> None:
        """Allocate the memory of recorded passes of these shapes."""
        for shape in shapes:
            num_lanes, num_rows = shape
            made = _projections(self._layers[0], num_lanes * num_rows, self._group)
            self._rooms[shape] = Room(made, _look(made.apart, num_lanes))

    def room(self, shape: Shape) -> Room:
        """Return the memory of recorded passes of one shape, allocated by `make_rooms`."""
        return self._rooms[shape]

    def projections(self, num_rows: int) -> Projections:
        """Return memory for a pass of `num_rows` rows; up to `NUM_TREE_SLOTS` it is kept."""
        made = self._projections.get(num_rows)
        if made is None:
            made = _projections(self._layers[0], num_rows, self._group)
            if num_rows <= NUM_TREE_SLOTS:
                self._projections[num_rows] = made
        return made

    def plan(
        self,
        apart: torch.Tensor,
        spans: Spans,
        masks: Sequence[torch.Tensor],
        num_visible: int,
    ) -> Plan:
        """Return the calls of attention of a pass.

        apart  [n, kv_heads, group, dim]: the memory that its queries will be in (`projections`)
        spans, num_visible  as in `Backend.forward`
        masks  per kind of layer, [1, 1, n, slots seen], added to the scores; of a pass of one lane
               it may cover only the last of the visible slots
        """
        if len(spans) == 1:
            looks = self._looks_of(apart, (len(apart),), together=False)
            kinds = [self._of_one_lane(spans, mask, num_visible) for mask in masks]
            return Plan(looks, self._by_layer(kinds))
        counts = tuple(span.num_rows for span in spans)
        groups = [spans] if is_grid(spans) else [(span,) for span in spans]
        sizes = [sum(span.num_rows for span in group) for group in groups]
        views = [self._views(group, num_visible) for group in groups]
        seen = list(zip(*views, strict=True))
        parted = []
        for mask in masks:
            parts = [mask] if len(groups) == 1 else torch.split(mask, sizes, 2)
            pairs = zip(parts, groups, strict=True)
            parted.append((seen, [self._mask_of(part, len(group)) for part, group in pairs]))
        looks = self._looks_of(apart, counts, together=len(groups) < len(spans))
        return Plan(looks, self._by_layer(parted))

    def _of_one_lane(
        self, spans: Spans, mask: torch.Tensor, num_visible: int
    ) -> tuple[Iterable[Sequence[Seen]], Sequence[torch.Tensor]]:
        """Return what a pass of one lane sees under a mask: per layer the views, and the mask."""
        length = mask.shape[3]
        if length < num_visible:  # the slots before a window are left out
            spans = (Span(spans[0].first_slot + num_visible - length, spans[0].num_rows),)
        return zip(self._views(spans, length)), (self._mask_of(mask, 1),)

    def _by_layer(
        self, kinds: Sequence[tuple[Iterable[Sequence[Seen]], Sequence[torch.Tensor | Visible]]]
    ) -> Iterable[LayerPlan]:
        """Return what each layer sees; `kinds`: per kind of layer all layers' views, and masks."""
        if len(kinds) == 1:
            return zip(kinds[0][0], repeat(kinds[0][1]))
        seen = [list(views) for views, _ in kinds]
        layers = enumerate(self._kinds.of_layers)
        return [(seen[kind][layer], kinds[kind][1]) for layer, kind in layers]

    def plan_recorded(
        self, shape: Shape, slots: torch.Tensor, masks: Sequence[torch.Tensor]
    ) -> Plan:
        """Return the calls of attention of a recorded pass, which serves any lanes.

        slots  [lanes * n] int64 on the device: the slots that the rows are written to, lane by
               lane; from these it is computed which lanes they are
        masks  per kind of layer, [1, 1, lanes * n, num_visible]
        """
        num_lanes, num_visible = shape[0], masks[0].shape[3]
        looks, picked = (self._rooms[shape].look,), None
        if num_lanes == self._lanes.count:  # there are no other lanes
            spans = tuple(Span(self._lanes.first_slot(i), shape[1]) for i in range(num_lanes))
            seen: list[Sequence[Seen]] = list(zip(self._views(spans, num_visible)))
        else:
            first = self._first_slots(slots, num_lanes)
            picked = (first[:, None] + torch.arange(num_visible, device=first.device)).view(-1)
            seen = list(zip(zip(self._layers, self._layers, strict=True)))
        kinds = [(seen, (self._mask_of(mask, num_lanes),)) for mask in masks]
        return Plan(looks, self._by_layer(kinds), picked)

    def plan_split(self, shape: Shape, rows: torch.Tensor) -> Plan:
        """Return the call of a recorded pass whose attention is split over the keys.

        `make_split` must have been called for the shape.

        rows  [5 or more, lanes * n] int64 on the device, as in `Backend.forward`
        """
        first, seen = self._first_slots(rows[2], shape[0]), list(zip(self._whole()))
        each = [words_of(rows, window) for window in self._kinds.numbers]
        kinds = [(seen, (self._splits[0].see(words, first),)) for words in each]
        return Plan((self._rooms[shape].look,), self._by_layer(kinds))

    def _first_slots(self, slots: torch.Tensor, num_lanes: int) -> torch.Tensor:
        """Return the first slot of each lane of a pass, [lanes] int64 on the device of `slots`."""
        return first_slots(slots.view(num_lanes, -1), self._lanes.num_slots)

    def _whole(self) -> list[Seen]:
        """Return, per layer, keys and values of all lanes as one, [1, kv_heads, slots, dim]."""
        return self._views((Span(0, 1),), self._lanes.total)

    def make_split(self, shape: Shape) -> None:
        """Compile attention that is split over the keys, for passes of one shape.

        Overwrites the first layer's cache, so call it before any text is opened.

        Raises:
            ModelError: it cannot be compiled here, gives other numbers, or does not split passes of
                so many rows.
        """
        with torch.inference_mode():
            self._layers[0].normal_()
            try:
                self._make_split(shape)
            finally:
                self._layers[0].zero_()

    def _make_split(self, shape: Shape) -> None:
        """Compile the first kind of split attention that can run here. Raises ModelError."""
        while not (split := self._splits[0]).takes(shape[1]):
            if split.made or len(self._splits) == 1:
                raise ModelError(f"{split.name} splits no pass of so many rows over the keys")
            self._splits.pop(0)
        try:
            split.make(shape, *self._whole()[0], self._scale)
        except ModelError as error:
            if split.made or len(self._splits) == 1:
                raise
            logger.info("attention is not split by %s: %s", split.name, error)
            self._splits.pop(0)
            self._make_split(shape)

    def attend(
        self, plan: Plan, layer: LayerPlan, beside: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one layer's attention; return the heads' outputs [n, heads * dim].

        layer   what that layer sees, from `plan.layers`
        beside  the queries of the only call, laid out as `Look.beside`; None: they are in the
                pass's memory
        """
        seen, masks = layer
        if plan.picked is not None:
            look = plan.looks[0]
            seen = (_picked(seen[0][0], plan.picked, look.num_lanes),)
        if len(seen) == 1:
            return self._attend(plan.looks[0], seen[0], masks[0], beside)
        looks = zip(plan.looks, seen, masks, strict=True)
        return torch.cat([self._attend(*look) for look in looks])

    def _attend(
        self,
        look: Look,
        seen: Seen,
        mask: torch.Tensor | Visible,
        beside: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one call of attention; return the heads' outputs [lanes * n, heads * dim]."""
        num_lanes, num_rows = look.num_lanes, look.num_rows
        if beside is None:
            beside = look.gathered()
        if isinstance(mask, Visible):
            out = self._splits[0].attend(beside, *seen, mask, self._scale)
        else:
            out = side_by_side(beside, *seen, mask, self._scale)
        if num_rows > 1:
            out = out.view(look.query.shape).transpose(1, 2)
        return out.reshape(num_lanes * num_rows, -1)

    def _mask_of(self, mask: torch.Tensor, num_lanes: int) -> torch.Tensor:
        """Return the mask of one call, [lanes, 1, n * group (1 if n is 1), num_visible]."""
        num_rows = mask.shape[2] // num_lanes
        if num_lanes > 1:
            mask = mask.view(num_lanes, 1, num_rows, -1)
        if num_rows == 1 or self._group == 1:
            return mask
        return mask.repeat_interleave(self._group, dim=2)

    def _views(self, spans: Spans, num_visible: int) -> list[Seen]:
        """Return, per layer, views of the keys and values of lanes at equal distances; cached."""
        key = spans[0].first_slot, len(spans), _stride(spans), num_visible
        made = self._seen.get(key)
        if made is None:
            if len(self._seen) > _MOST_MADE:
                self._seen.clear()
            made = self._seen[key] = [_view(layer, spans, num_visible) for layer in self._layers]
        return made

    def _looks_of(
        self, apart: torch.Tensor, counts: tuple[int, ...], *, together: bool
    ) -> list[Look]:
        """Return the queries of each call; cached for passes up to `NUM_TREE_SLOTS` rows.

        apart   [n, kv_heads, group, dim]: the pass's queries
        counts  number of rows of each lane
        """
        made = self._looks.get((counts, together))
        if made is None:
            num_lanes = len(counts) if together else 1
            parts = [apart] if together else torch.split(apart, list(counts))
            made = [_look(part, num_lanes) for part in parts]
            if len(apart) <= NUM_TREE_SLOTS:  # longer passes get new memory each time
                if len(self._looks) > _MOST_MADE:
                    self._looks.clear()
                self._looks[counts, together] = made
        return made


def _projections(cache: torch.Tensor, num_rows: int, group: int) -> Projections:
    """Allocate the projections' memory for passes over a cache [2 kv_heads, slots, dim]."""
    num_keys, dim = len(cache) // 2, cache.shape[2]
    num_queries = num_keys * group
    heads = cache.new_empty(num_rows, num_queries + 2 * num_keys, dim)
    turned = heads[:, : num_queries + num_keys]
    first, second = turned.chunk(2, dim=-1)
    return Projections(
        heads=heads.view(num_rows, -1),
        turned=turned,
        halves=(second, first),
        swapped=torch.empty_like(turned, memory_format=torch.contiguous_format),
        written=heads[:, num_queries:].transpose(0, 1),
        apart=heads[:, :num_queries].view(num_rows, num_keys, group, dim),
    )


def _look(apart: torch.Tensor, num_lanes: int) -> Look:
    """Return the layout of one call's queries [lanes * n, kv_heads, group, dim]."""
    num_keys, group, dim = apart.shape[1:]
    num_rows = len(apart) // num_lanes
    query = apart.view(num_lanes, num_rows, num_keys, group, dim).transpose(1, 2)
    shape = num_lanes, num_keys, num_rows * group, dim
    beside = apart.view(shape) if num_rows == 1 else query.new_empty(shape)
    return Look(num_lanes, num_rows, query, beside, beside.view(query.shape))


def _picked(cache: torch.Tensor, slots: torch.Tensor, num_lanes: int) -> Seen:
    """Return copies of keys and values at some slots of a layer's cache [2 kv_heads, slots, dim].

    slots  [lanes * num_visible] int64, lane by lane
    """
    heads, _, dim = cache.shape
    picked = cache.index_select(1, slots).view(heads, num_lanes, -1, dim).transpose(0, 1)
    keys, values = picked.chunk(2, dim=1)
    return keys, values


def _stride(spans: Spans) -> int:
    """Return the distance, in slots, of lanes at equal distances; 0 for one lane."""
    return spans[1].first_slot - spans[0].first_slot if len(spans) > 1 else 0


def _view(cache: torch.Tensor, spans: Spans, num_visible: int) -> Seen:
    """Return views of the keys and values of lanes at equal distances, of a layer's cache.

    cache  [2 kv_heads, slots, dim]
    """
    heads, num_slots, dim = cache.shape
    shape = len(spans), heads // 2, num_visible, dim
    strides = _stride(spans) * dim, num_slots * dim, dim, 1
    first = cache.storage_offset() + spans[0].first_slot * dim
    keys = cache.as_strided(shape, strides, first)
    return keys, cache.as_strided(shape, strides, first + heads // 2 * num_slots * dim)
