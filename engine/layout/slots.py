"""Which cache slot holds which token: the layout of one KV cache, without touching a tensor.

Theory of operation
-------------------
A cache is divided among several texts, a *lane* each:

    lane 0                         lane 1                         ...
    [0, capacity) | scratch        [num_slots, ...) | scratch

A lane is a run of slots. A text knows only the slots of its own lane, from 0; rows that fill a pass
up to a fixed shape write to the scratch slots at the end of a lane. A pass has the rows of each
lane side by side (`Span`), and no row ever sees a slot of another lane.

A lane has two half-open regions, left to right:

    [0, prefix_len)                            committed tokens; slot == position; seen by all rows
    [prefix_len, prefix_len + num_tree_slots)  the speculation tree; seen by an ancestor mask

A tree node lives in whichever tree slot was free, and its *mask* says which tree slots it may
see: its parent's mask plus its own bit. Bit `i` of a mask stands for slot `prefix_len + i`, so they
are plain integers of at most `num_tree_slots` bits and moving the prefix is a shift. A node may lie
in a lower slot than its parent.

Rolling back costs nothing: a dead node's slot is free again, and what it held is never visible.
Committing a chain costs nothing either: its nodes already lie where committed tokens belong. Only
committing a path that lies scattered moves rows, and that is one gather over all layers (`Move`).

`SlotMap` counts committed tokens (`prefix_len`) and passes them on; which text it is belongs to the
tree of the process.
"""

from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

NUM_TREE_SLOTS = 64
SLOT_STEP = 64  # how many slots passes cover goes up by so many
# Fewer missing committed tokens than this share a pass with tree nodes; more are prefilled first.
MAX_MISSING = 16


# -- one lane --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Feed:
    """The rows of one forward pass.

    lane       of the cache; slots count from its start
    tokens     token id per row
    positions  number of tokens before the row's token on its path
    slots      where the row's key and value go
    prefix_len every row sees the slots [0, prefix_len)
    masks      per row, which of the slots prefix_len + i it sees besides (bit i, its own included);
               None means causal: row j sees [0, slots[j]] (prefill; its slots are its positions)
    before     per row, the slot of the token before it on its path; -1: there is none. Made of
               nothing, it is the slot before the row's own, as in a chain
    features   for heads alone (`heads/eagle.py`): per row the bytes of the target's feature before
               it; b"": what the head itself has predicted for that; None: nothing is known of it.
               () is b"" for all rows
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    prefix_len: int
    masks: tuple[int, ...] | None
    lane: int = 0
    before: tuple[int, ...] = ()
    features: tuple[bytes | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.before:
            object.__setattr__(self, "before", tuple(slot - 1 for slot in self.slots))

    @property
    def total(self) -> int:
        """Number of slots from 0 up to the highest that this pass writes or can see.

        A row may see further than any row of the pass is written: its parent can lie behind it.
        """
        end = max(self.prefix_len, max(self.slots) + 1)
        if self.masks is None:
            return end
        return max(end, self.prefix_len + max(self.masks).bit_length())


@dataclass(frozen=True, slots=True)
class Move:
    """Copy cache rows `sources` to `targets` of a lane, all read before any is written."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    lane: int = 0


@dataclass(slots=True)
class _Place:
    slot: int  # absolute; prefix_len <= slot < prefix_len + num_tree_slots
    mask: int  # relative to prefix_len; includes the node's own bit and all its ancestors'


class SlotMap(Generic[K]):
    """Layout of one lane of a cache, for one session. `K` names tree nodes (a path hash)."""

    def __init__(
        self, capacity: int, num_tree_slots: int = NUM_TREE_SLOTS, *, lane: int = 0
    ) -> None:
        assert 0 < num_tree_slots <= capacity
        self.lane = lane
        self.capacity = capacity
        self.num_tree_slots = num_tree_slots
        # Committed tokens that are cached. Nodes have places only while all committed ones are.
        self.prefix_len = 0
        self.fed_len = 0  # of them, those that were fed as such, and not as nodes of the tree
        self._places: dict[K, _Place] = {}
        self._taken = 0  # bit i: slot prefix_len + i is one of these places'

    def __contains__(self, key: K) -> bool:
        return key in self._places

    @property
    def num_free(self) -> int:
        """Tree slots that can still be given out."""
        within = min(self.num_tree_slots, self.capacity - self.prefix_len)
        return within - len(self._places)

    def truncate(self, length: int) -> None:
        """Forget the tree and every committed token from position `length` on."""
        self._places.clear()
        self._taken = 0
        self.prefix_len = min(self.prefix_len, length)
        self.fed_len = min(self.fed_len, length)

    def adopt(self, length: int) -> None:
        """The first `length` committed tokens have been copied here from another lane."""
        assert not self._places, "a copy comes before any node"
        assert self.prefix_len < length <= self.capacity
        self.prefix_len = self.fed_len = length

    def next_chunk(self, text: Sequence[int], end: int, chunk_len: int) -> Sequence[int]:
        """What to prefill next of text[:end]; empty if `feed` can take what is missing."""
        if end - self.prefix_len <= MAX_MISSING:
            return ()
        return text[self.prefix_len : min(end, self.prefix_len + chunk_len)]

    def feed_prefix(self, tokens: Sequence[int]) -> Feed:
        """Place committed `tokens` behind the prefix, as one causal chunk of a prefill."""
        assert tokens, "a chunk holds at least one token"
        assert not self._places, "a prefill comes before any node"
        start, end = self.prefix_len, self.prefix_len + len(tokens)
        assert end <= self.capacity, f"{end} tokens do not fit into {self.capacity} slots"
        self.prefix_len = self.fed_len = end
        where = tuple(range(start, end))
        before = tuple(range(start - 1, end - 1))
        return Feed(tuple(tokens), where, where, start, None, self.lane, before)

    def feed(
        self,
        missing: Sequence[int],
        nodes: Sequence[tuple[K, K | None, int, int]] = (),
        *,
        num_again: int = 0,
    ) -> Feed:
        """Place the committed tokens that the cache lacks, then tree nodes, in one pass.

        missing    committed tokens from position prefix_len on (few: they share the tree's mask)
        nodes      (key, parent key or None for the last committed token, token, position),
                   parents first
        num_again  `missing` begins so many tokens before: rows that are written once more, where
                   they are, because more is known of them now; the tree stays

        After the call all of them count as cached: the device works in order, so nothing that is
        launched later can see an unwritten slot.
        """
        start, count = self.prefix_len - num_again, len(missing)
        assert count >= num_again
        assert count == num_again or not self._places, (
            "nodes exist although committed tokens are missing"
        )
        assert count or nodes, "a pass has no rows"
        assert count + len(nodes) <= self.num_tree_slots, "the rows of a pass share one mask word"
        masks = [(1 << (i + 1)) - 1 for i in range(count)]
        tokens, positions = list(missing), list(range(start, start + count))
        slots, before = list(positions), list(range(start - 1, start + count - 1))
        self.prefix_len = self.fed_len = start + count
        missing_mask = (1 << count) - 1
        for key, parent, token, position in nodes:
            above = None if parent is None else self._places[parent]
            place = self._allocate(key, above)
            before.append(self.prefix_len - 1 if above is None else above.slot)
            masks.append(place.mask << count | missing_mask)
            tokens.append(token)
            positions.append(position)
            slots.append(place.slot)
        assert max(masks).bit_length() <= NUM_TREE_SLOTS, "the rows of a pass share one mask word"
        rows = tuple(tokens), tuple(positions), tuple(slots), start, tuple(masks)
        return Feed(*rows, self.lane, tuple(before))

    def rename(self, key: K, to: K | None) -> None:
        """A node that was fed before it had a name gets it; None: it was not fed after all."""
        if (place := self._places.pop(key, None)) is None:
            return
        if to is None:
            self._taken ^= 1 << (place.slot - self.prefix_len)
        else:
            self._places[to] = place

    def _allocate(self, key: K, above: _Place | None) -> _Place:
        """Give a node the lowest free slot; `above` is its parent's, if that is in the tree."""
        assert key not in self._places, "a node is fed once"
        own = ~self._taken & (self._taken + 1)
        index = own.bit_length() - 1
        assert index < self.num_tree_slots, "no free tree slot"
        assert self.prefix_len + index < self.capacity, "the cache is full"
        place = _Place(self.prefix_len + index, own if above is None else above.mask | own)
        self._places[key] = place
        self._taken |= own
        return place

    def advance(self, path: Sequence[K], survivors: Container[K]) -> Move | None:
        """Commit the nodes of `path` (the first hangs on the last committed token).

        `survivors` stay, every other node dies. Nodes of `path` that are not cached stay missing:
        the caller feeds them.
        Returns the copy that the cache must make, or None.
        """
        cached = 0
        while cached < len(path) and path[cached] in self._places:
            cached += 1
        places, prefix_len = self._places, self.prefix_len
        steps = [places[key].slot for key in path[:cached]]
        kept = {key: place for key, place in places.items() if key in survivors}
        assert not kept or cached == len(path), "a cached node below an uncached one"
        new_prefix = prefix_len + cached
        moves = {step: slot for slot, step in enumerate(steps, prefix_len) if step != slot}
        if kept:
            committed = sum([1 << (slot - prefix_len) for slot in steps])
            for place in kept.values():
                place.mask &= ~committed
            moves |= self._relocate(kept, new_prefix)
        self._places, self.prefix_len = kept, new_prefix
        self._taken = sum([1 << (place.slot - new_prefix) for place in kept.values()])
        return Move(tuple(moves), tuple(moves.values()), self.lane) if moves else None

    def _relocate(self, kept: dict[K, _Place], new_prefix: int) -> dict[int, int]:
        """Shift the survivors' masks to the new prefix; move those that lie where it goes."""
        taken = {place.slot for place in kept.values()}
        free = (slot for slot in range(new_prefix, self.capacity) if slot not in taken)
        moves = {slot: next(free) for slot in sorted(taken) if slot < new_prefix}
        if not moves:
            for place in kept.values():
                place.mask >>= new_prefix - self.prefix_len
            return moves
        old_bits = {slot: 1 << (slot - self.prefix_len) for slot in taken}
        new_bits = {slot: 1 << (moves.get(slot, slot) - new_prefix) for slot in taken}
        for place in kept.values():
            place.mask = sum(new_bits[slot] for slot in taken if place.mask & old_bits[slot])
            place.slot = moves.get(place.slot, place.slot)
        return moves

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert self.fed_len <= self.prefix_len
        slots = [place.slot for place in self._places.values()]
        assert len(set(slots)) == len(slots), "two nodes in one slot"
        for place in self._places.values():
            index = place.slot - self.prefix_len
            assert 0 <= index < self.num_tree_slots
            assert place.slot < self.capacity
            assert place.mask >> index & 1, "a node sees itself"
            assert place.mask < 1 << self.num_tree_slots
        taken = sum(1 << (slot - self.prefix_len) for slot in slots)
        assert self._taken == taken, "a slot is taken by no node, or a node's is free"


# -- all lanes -------------------------------------------------------------------------------------


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


def in_steps(num_slots: int) -> int:
    """A number of slots rounded up to a multiple of `SLOT_STEP`."""
    return -(-num_slots // SLOT_STEP) * SLOT_STEP


def lane_counts(num_lanes: int) -> tuple[int, ...]:
    """Up to how many lanes passes of several lanes are filled up: 1, 2, 4, 8, ... or all."""
    return (*(1 << power for power in range((num_lanes - 1).bit_length())), num_lanes)


def num_lanes_within(limit_bytes: int, slot_bytes: int, slots_per_lane: int) -> int:
    """Return how many lanes fit into so much memory; 0 if not even one does.

    slot_bytes      keys and values of one token (`kv_cache.slot_bytes`)
    slots_per_lane  the longest text and its tree, scratch included (`Executor.lanes.num_slots`)
    """
    return limit_bytes // (slot_bytes * slots_per_lane)


def copied(moves: Iterable[Move], lanes: LaneLayout) -> tuple[list[int], list[int]]:
    """Slots of the whole cache that moves of several lanes read, and those that they write."""
    sources: list[int] = []
    targets: list[int] = []
    for move in moves:
        first = lanes.first_slot(move.lane)
        sources += (first + slot for slot in move.sources)
        targets += (first + slot for slot in move.targets)
    return sources, targets
