"""Attention of a pass over the lanes of one cache: which rows look where, all at once or in turn.

Owns the views of the cache and the layout of the queries, made once for each shape of a pass, and
which form of attention runs. Rows of several lanes that have as many each are looked after in one
call where that is faster, which is timed; else each lane has a call of its own. In either way a row
meets the keys and values of its own lane alone. Knows no model.

Passes that are recorded (`graphs.py`) find their lanes while they run: where a lane begins is a
number on the device. They write to memory of their own (`Room`), which is never given back: a
recording goes on writing there for as long as it lives.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch

from engine.errors import ModelError
from engine.forward.flex_attention import FlexAttention, Visible
from engine.forward.forward import Shape, Spans
from engine.forward.kv_cache import first_slots
from engine.forward.operators import (
    BATCHED_OF_ONE_ROW,
    BATCHED_OF_ROWS,
    FORMS_OF_ONE_ROW,
    FORMS_OF_ROWS,
    Attention,
    Decide,
    as_timed,
    one_by_one,
    quickest,
    side_by_side,
)
from engine.layout.slots import NUM_TREE_SLOTS, LaneLayout, Span, is_grid

Seen = tuple[torch.Tensor, torch.Tensor]
"""(keys, values) [lanes, kv_heads, num_visible, dim]: views of one layer's cache; for attention
that is split over the keys [1, kv_heads, slots, dim], all lanes of it"""

_TIMED_ROWS, _TIMED_SLOTS = 8, 256  # of the passes at which forms of attention are timed
_LOOP = "lane by lane"
_MOST_MADE = 64


@dataclass(frozen=True, slots=True)
class Projections:
    """Memory for the projections of n rows and views of it: a view costs as much as an operator.

    heads     [n, (heads + 2 kv_heads) * dim]: queries, keys and values
    turned    [n, heads + kv_heads, dim]: queries and keys
    halves    the second and the first half of `turned`, along dim
    swapped   like `turned`
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
    """What one call of attention looks from: n rows in each of some lanes.

    query   [lanes, kv_heads, n, group, dim]: a view of the pass's queries
    beside  [lanes, kv_heads, n * group, dim]: those of a group side by side; of one row the same
            memory
    apart   `beside`, as `query` has its dimensions
    """

    num_lanes: int
    num_rows: int
    query: torch.Tensor
    beside: torch.Tensor
    apart: torch.Tensor

    def gathered(self) -> torch.Tensor:
        """The queries of the pass, copied to `beside` if they do not lie there."""
        if self.num_rows > 1:
            self.apart.copy_(self.query)
        return self.beside


@dataclass(frozen=True, slots=True)
class Room:
    """Where recorded passes of one shape have their projections and their only look."""

    made: Projections
    look: Look


@dataclass(frozen=True, slots=True)
class Plan:
    """The calls of a pass, the same in every layer.

    masks   for each look [lanes, 1, n * group (1 if n is 1), num_visible], added to the scores;
            or what it sees, where attention is split over the keys
    seen    by layer, for each look
    picked  [lanes * num_visible] int64: the slots that the only look sees, which are copied out of
            a layer's cache; `seen` is then that cache, twice. None: `seen` is what is seen
    """

    looks: Sequence[Look]
    masks: Sequence[torch.Tensor | Visible]
    seen: Iterable[Sequence[Seen]]
    picked: torch.Tensor | None = None


class LaneAttention:
    """The attention of a model over a cache [layers, 2 kv_heads, lanes.total, dim]."""

    def __init__(
        self,
        cache: torch.Tensor,
        lanes: LaneLayout,
        group: int,
        scale: float,
        decide: Decide = as_timed,
    ) -> None:
        """`group` query heads share a key head; `decide` says which of some timed forms is used."""
        self._decide = decide
        self._layers = cache.unbind()
        self._lanes = lanes
        self._group = group
        self._scale = scale
        self._projections: dict[int, Projections] = {}  # by number of rows
        # By rows of each lane and whether they are looked after together.
        self._looks: dict[tuple[tuple[int, ...], bool], list[Look]] = {}
        # Of all layers, by first slot, number and distance of the lanes, and slots of each.
        self._seen: dict[tuple[int, int, int, int], list[Seen]] = {}
        self._rooms: dict[Shape, Room] = {}  # of passes that are recorded, for ever
        self._one_row: Attention = side_by_side
        self._rows: Attention = side_by_side
        # Over several lanes at once; None: each has a call of its own.
        each = None if cache.device.type == "cpu" else side_by_side
        self._one_row_each: Attention | None = each
        self._rows_each: Attention | None = each
        self._flex = FlexAttention(lanes.num_slots, group, num_lanes=lanes.count)

    def twin(self) -> "LaneAttention":
        """The same over the same cache, for passes that lie elsewhere."""
        made = copy(self)
        made._projections = {}
        made._looks = {}
        made._rooms = {}
        return made

    def make_rooms(self, shapes: Iterable[Shape]) -> None:
        """Take the memory of passes that will be recorded: there are no others."""
        for shape in shapes:
            num_lanes, num_rows = shape
            made = _projections(self._layers[0], num_lanes * num_rows, self._group)
            self._rooms[shape] = Room(made, _look(made.apart, num_lanes))

    def room(self, shape: Shape) -> Room:
        """The memory of recorded passes of one shape (`make_rooms`)."""
        return self._rooms[shape]

    def projections(self, num_rows: int) -> Projections:
        """Memory for a pass of so many rows; up to `NUM_TREE_SLOTS` always the same."""
        made = self._projections.get(num_rows)
        if made is None:
            made = _projections(self._layers[0], num_rows, self._group)
            if num_rows <= NUM_TREE_SLOTS:
                self._projections[num_rows] = made
        return made

    def choose_forms(self) -> None:
        """Find the fastest forms, over the first layer's cache."""
        self._one_row = self._quickest(FORMS_OF_ONE_ROW, 1, 1)
        self._rows = self._quickest(FORMS_OF_ROWS, _TIMED_ROWS, 1)
        count = self._lanes.count
        if count > 1:
            self._one_row_each = self._quickest_of_lanes(BATCHED_OF_ONE_ROW, self._one_row, 1)
            self._rows_each = self._quickest_of_lanes(BATCHED_OF_ROWS, self._rows, _TIMED_ROWS)

    def _quickest_of_lanes(
        self, forms: Mapping[str, Attention], alone: Attention, num_rows: int
    ) -> Attention | None:
        loop = one_by_one(alone)
        found = self._quickest({**forms, _LOOP: loop}, num_rows, self._lanes.count)
        return None if found is loop else found

    def _quickest(self, forms: Mapping[str, Attention], num_rows: int, num_lanes: int) -> Attention:
        spans = tuple(Span(self._lanes.first_slot(lane), num_rows) for lane in range(num_lanes))
        num_visible = min(_TIMED_SLOTS, self._lanes.num_slots)
        keys, values = _view(self._layers[0], spans, num_visible)
        query = keys.new_zeros(num_lanes, keys.shape[1], num_rows * self._group, keys.shape[3])
        num_masks = 1 if num_rows == 1 else query.shape[2]
        mask = keys.new_zeros(num_lanes, 1, num_masks, num_visible)
        found = quickest(forms, query, keys, values, mask, self._scale)
        return forms[self._decide(found, tuple(forms))]

    def plan(self, apart: torch.Tensor, spans: Spans, mask: torch.Tensor) -> Plan:
        """Lay the calls of a pass out.

        apart  [n, kv_heads, group, dim]: where its queries will lie (`projections`)
        spans  as in `Backend.forward`
        mask   [1, 1, n, num_visible], added to the scores
        """
        num_visible = mask.shape[3]
        if len(spans) == 1:
            looks = self._looks_of(apart, (len(apart),), together=False)
            return Plan(looks, (self._mask_of(mask, 1),), zip(self._views(spans, num_visible)))
        counts = tuple(span.num_rows for span in spans)
        form = self._one_row_each if counts[0] == 1 else self._rows_each
        groups = [spans] if form is not None and is_grid(spans) else [(span,) for span in spans]
        sizes = [sum(span.num_rows for span in group) for group in groups]
        parts = [mask] if len(groups) == 1 else torch.split(mask, sizes, 2)
        masks = [self._mask_of(part, len(group)) for part, group in zip(parts, groups, strict=True)]
        views = [self._views(group, num_visible) for group in groups]
        looks = self._looks_of(apart, counts, together=len(groups) < len(spans))
        return Plan(looks, masks, zip(*views, strict=True))

    def plan_recorded(self, shape: Shape, slots: torch.Tensor, mask: torch.Tensor) -> Plan:
        """The same for a pass that is recorded: it serves any lanes.

        slots  [lanes * n] int64 on the device: where the rows are written, lane by lane, which
               says what lanes these are
        mask   as for `plan`
        """
        num_lanes, num_visible = shape[0], mask.shape[3]
        looks, masks = (self._rooms[shape].look,), (self._mask_of(mask, num_lanes),)
        if num_lanes == self._lanes.count:  # there are no other lanes
            spans = tuple(Span(self._lanes.first_slot(i), shape[1]) for i in range(num_lanes))
            return Plan(looks, masks, zip(self._views(spans, num_visible)))
        first = self._first_slots(slots, num_lanes)
        picked = first[:, None] + torch.arange(num_visible, device=first.device)
        caches = zip(self._layers, self._layers, strict=True)
        return Plan(looks, masks, zip(caches), picked.view(-1))

    def plan_split(self, shape: Shape, slots: torch.Tensor, words: torch.Tensor) -> Plan:
        """The same for attention that is split over the keys; `make_split` has made its program.

        words  [2, lanes * n] int64 on the device: what each row sees (`masks.as_words`)
        """
        visible = self._flex.see(words, self._first_slots(slots, shape[0]))
        return Plan((self._rooms[shape].look,), (visible,), zip(self._whole()))

    def _first_slots(self, slots: torch.Tensor, num_lanes: int) -> torch.Tensor:
        """See `first_slots`."""
        return first_slots(slots.view(num_lanes, -1), self._lanes.num_slots)

    def _whole(self) -> list[Seen]:
        """All lanes of each layer's cache as one."""
        return self._views((Span(0, 1),), self._lanes.total)

    def make_split(self, shape: Shape) -> None:
        """Compile attention that is split over the keys, for passes of one shape.

        Overwrites the first layer's cache: only before a session.

        Raises:
            ModelError: it cannot be compiled here, or gives other numbers, or splits nothing.
        """
        if not self._flex.takes(shape[1]):
            raise ModelError("FlexAttention splits no pass of so many rows over the keys")
        with torch.inference_mode():
            self._layers[0].normal_()
            try:
                self._flex.make(shape, *self._whole()[0], self._scale)
            finally:
                self._layers[0].zero_()

    def attend(
        self, plan: Plan, seen: Sequence[Seen], beside: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the heads' outputs [n, heads * dim] in the layer that `seen` is of.

        beside  the queries of the only look, as `Look.beside`; None: they lie in its memory
        """
        if plan.picked is not None:
            look = plan.looks[0]
            seen = (_picked(seen[0][0], plan.picked, look.num_lanes),)
        if len(seen) == 1:
            return self._attend(plan.looks[0], seen[0], plan.masks[0], beside)
        looks = zip(plan.looks, seen, plan.masks, strict=True)
        return torch.cat([self._attend(*look) for look in looks])

    def _attend(
        self,
        look: Look,
        seen: Seen,
        mask: torch.Tensor | Visible,
        beside: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the heads' outputs [lanes * n, heads * dim] of one look."""
        num_lanes, num_rows = look.num_lanes, look.num_rows
        if beside is None:
            beside = look.gathered()
        if isinstance(mask, Visible):
            out = self._flex.attend(beside, *seen, mask, self._scale)
        else:
            if num_rows == 1:
                form = self._one_row if num_lanes == 1 else self._one_row_each
            else:
                form = self._rows if num_lanes == 1 else self._rows_each
            # Recorded passes look after all lanes together, also where that is not the fastest way.
            out = (form or side_by_side)(beside, *seen, mask, self._scale)
        if num_rows > 1:
            out = out.view(look.query.shape).transpose(1, 2)
        return out.reshape(num_lanes * num_rows, -1)

    def _mask_of(self, mask: torch.Tensor, num_lanes: int) -> torch.Tensor:
        """Return the mask of one look: a row for each query head, if its lanes have several."""
        num_rows = mask.shape[2] // num_lanes
        if num_lanes > 1:
            mask = mask.view(num_lanes, 1, num_rows, -1)
        if num_rows == 1 or self._group == 1:
            return mask
        return mask.repeat_interleave(self._group, dim=2)

    def _views(self, spans: Spans, num_visible: int) -> list[Seen]:
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
        made = self._looks.get((counts, together))
        if made is None:
            num_lanes = len(counts) if together else 1
            parts = [apart] if together else torch.split(apart, list(counts))
            made = [_look(part, num_lanes) for part in parts]
            if len(apart) <= NUM_TREE_SLOTS:  # those of longer passes do not stay where they are
                if len(self._looks) > _MOST_MADE:
                    self._looks.clear()
                self._looks[counts, together] = made
        return made


def _projections(cache: torch.Tensor, num_rows: int, group: int) -> Projections:
    """Allocate it for passes over a layer's cache [2 kv_heads, slots, dim]."""
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
    """Lay out the queries [lanes * n, kv_heads, group, dim] of one look."""
    num_keys, group, dim = apart.shape[1:]
    num_rows = len(apart) // num_lanes
    query = apart.view(num_lanes, num_rows, num_keys, group, dim).transpose(1, 2)
    shape = num_lanes, num_keys, num_rows * group, dim
    beside = apart.view(shape) if num_rows == 1 else query.new_empty(shape)
    return Look(num_lanes, num_rows, query, beside, beside.view(query.shape))


def _picked(cache: torch.Tensor, slots: torch.Tensor, num_lanes: int) -> Seen:
    """Copy slots out of a layer's cache [2 kv_heads, slots, dim], of each lane as many."""
    heads, _, dim = cache.shape
    picked = cache.index_select(1, slots).view(heads, num_lanes, -1, dim).transpose(0, 1)
    keys, values = picked.chunk(2, dim=1)
    return keys, values


def _stride(spans: Spans) -> int:
    """The distance of lanes at equal distances; 0 for one."""
    return spans[1].first_slot - spans[0].first_slot if len(spans) > 1 else 0


def _view(cache: torch.Tensor, spans: Spans, num_visible: int) -> Seen:
    """Return what lanes at equal distances hold in a layer's cache [2 kv_heads, slots, dim]."""
    heads, num_slots, dim = cache.shape
    shape = len(spans), heads // 2, num_visible, dim
    strides = _stride(spans) * dim, num_slots * dim, dim, 1
    first = cache.storage_offset() + spans[0].first_slot * dim
    keys = cache.as_strided(shape, strides, first)
    return keys, cache.as_strided(shape, strides, first + heads // 2 * num_slots * dim)
