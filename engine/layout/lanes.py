"""How the slots of one cache are divided among several texts: a lane each (pure).

    lane 0                         lane 1                         ...
    [0, capacity) | scratch        [num_slots, ...) | scratch

A lane is a run of slots. A text knows only the slots of its own lane, from 0; rows that fill a pass
up to a fixed shape write to the scratch slots at the end of a lane. A pass has the rows of each
lane side by side (`Span`), and no row ever sees a slot of another lane.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """The division of a cache.

    count      number of lanes
    num_slots  of one lane, its scratch included
    """

    count: int
    num_slots: int

    @property
    def total(self) -> int:
        """Slots of the whole cache."""
        return self.count * self.num_slots

    def first_slot(self, lane: int) -> int:
        """Where a lane begins."""
        assert 0 <= lane < self.count, f"lane {lane}, but the cache has {self.count}"
        return lane * self.num_slots


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a pass that see one lane.

    first_slot  where the lane begins: its slot s is slot first_slot + s of the cache
    """

    first_slot: int
    num_rows: int


def is_grid(spans: Sequence[Span]) -> bool:
    """Whether all lanes have as many rows and lie at equal distances, so that one view has them."""
    if len({span.num_rows for span in spans}) > 1:
        return False
    return len({after.first_slot - before.first_slot for before, after in pairwise(spans)}) <= 1


def num_lanes_within(limit_bytes: int, slot_bytes: int, slots_per_lane: int) -> int:
    """Return how many lanes fit into so much memory; 0 if not even one does.

    slot_bytes      keys and values of one token (`kv_cache.slot_bytes`)
    slots_per_lane  the longest text and its tree, scratch included (`Executor.lanes.num_slots`)
    """
    return limit_bytes // (slot_bytes * slots_per_lane)
