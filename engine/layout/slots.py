"""Which cache slot holds which token: the layout of one KV cache, without touching a tensor.

Theory of operation
-------------------
A cache is divided among several texts (sequences). The part of one text is its *lane*:

    lane 0                         lane 1                         ...
    [0, capacity) | scratch        [num_slots, ...) | scratch

A lane is a run of consecutive slots; a slot holds the key and value of one token. A text counts the
slots of its own lane from 0. Padding rows, which fill a pass up to a fixed shape, write to the
scratch slots at the end of a lane. In a pass the rows of one lane are consecutive (`Span`), and no
row ever sees a slot of another lane.

A lane has two half-open regions, left to right:

    [0, prefix_len)                            committed tokens; slot == position; seen by all rows
    [prefix_len, prefix_len + num_tree_slots)  the speculation tree; seen by an ancestor mask

A tree node lives in whichever tree slot was free, and its *mask* says which tree slots it may
see: its parent's mask plus its own bit. Bit `i` of a mask stands for slot `prefix_len + i`, so they
are plain integers of at most `num_tree_slots` bits and moving the prefix is a shift. A node may lie
in a lower slot than its parent.

In layers with an attention window (`attention_windows.py`) a row sees only what lies at the lowest
position of its window or after it. For committed tokens that is a range of slots; which tree slots
are left is another mask (`Feed.near`), because slots of the tree are in no order.

Rolling back costs nothing: a dead node's slot is free again, and what it held is never visible.
Committing a chain costs nothing either: its nodes already lie where committed tokens belong. Only
committing a path whose nodes lie in scattered slots moves cache rows, and that is one gather over
all layers (`Move`).

`SlotMap` only counts committed tokens (`prefix_len`) and places tokens that it is given; it does
not store the text, which the speculation tree (`proto/tree.py`) of the process does.
"""

from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, TypeVar

from engine.layout.attention_windows import AttentionWindow

K = TypeVar("K", bound=Hashable)

NUM_TREE_SLOTS = 64
BLOCK = 128  # slots that attention on a GPU skips or reads together
SLOT_STEP = 64  # passes cover a multiple of so many slots
# Up to this many uncached committed tokens share a pass with tree nodes; more are prefilled first.
MAX_MISSING = 16


# -- one lane --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Feed:
    """The rows (tokens) of one text in a forward pass: what they are and which slots they use.

    lane       lane of the cache that the text uses; slots count from the lane's start
    tokens     token id per row
    positions  per row, its position: the number of tokens before its token on its path
    slots      per row, the slot that its key and value are written to
    prefix_len every row sees the slots [0, prefix_len)
    masks      per row, a bit mask of the other slots that it sees: bit i stands for slot
               prefix_len + i, and the row's own bit is set; None means causal attention: row j
               sees [0, slots[j]] (prefill, where a row's slot equals its position)
    near       per attention window of the model, what `masks` is for the layers with that window:
               without ancestors that lie before it. (): no window hides any of these. What a window
               hides of the prefix follows from a row's position
    before     per row, the slot of the token before it on its path; -1 if there is none. If left
               out, it is the slot before the row's own, as in a chain
    features   only for heads (`heads/eagle.py`): per row, the bytes of the target's hidden state
               of the token before; b"": use the one that the head itself predicted; None: neither
               exists. () means b"" for all rows
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    prefix_len: int
    masks: tuple[int, ...] | None
    lane: int = 0
    before: tuple[int, ...] = ()
    features: tuple[bytes | None, ...] = ()
    near: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.before:
            object.__setattr__(self, "before", tuple(slot - 1 for slot in self.slots))

    @property
    def total(self) -> int:
        """Return the number of slots, from 0, that include every slot written or seen by the pass.

        A row may see slots beyond all that are written: its parent may lie in a higher slot.
        """
        end = max(self.prefix_len, max(self.slots) + 1)
        if self.masks is None:
            return end
        return max(end, self.prefix_len + max(self.masks).bit_length())

    @classmethod
    def chain(cls, lane: int, num_rows: int, num_tokens: int = 1, start: int = 0) -> "Feed":
        """Return a chain of rows from slot `start` of a lane, with tokens 0, 1, ... < `num_tokens`.

        Of a mixture of experts, rows of one token would all choose the same experts.
        """
        where = tuple(range(start, start + num_rows))
        tokens = tuple(row % num_tokens for row in range(num_rows))
        masks = tuple((2 << row) - 1 for row in range(num_rows))
        return cls(tokens, where, where, start, masks, lane)


def with_near(feed: Feed, windows: Sequence[AttentionWindow]) -> Feed:
    """Return the feed with its `near`, if all slots that it sees after the prefix are its rows'.

    windows  the model's attention windows
    """
    assert feed.masks is not None
    places = tuple(zip(feed.slots, feed.positions, strict=True))

    def cut(lowest: int, mask: int) -> int:
        return mask & ~sum(1 << slot - feed.prefix_len for slot, at in places if at < lowest)

    rows = tuple(zip(feed.positions, feed.masks, strict=True))
    near = tuple(tuple(cut(one.lowest(at), mask) for at, mask in rows) for one in windows)
    return replace(feed, near=near)


@dataclass(frozen=True, slots=True)
class Move:
    """Instruction to copy the slots `sources` of a lane to `targets`; all reads come first."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    lane: int = 0


@dataclass(slots=True)
class _Place:
    """Where a tree node lies, and what it may see."""

    slot: int  # absolute; prefix_len <= slot < prefix_len + num_tree_slots
    position: int
    mask: int  # relative to prefix_len; includes the node's own bit and all its ancestors'


class SlotMap(Generic[K]):
    """Layout of one lane (sequence slot) of a cache: assigns slots to the tokens of one text.

    `K` is the type of the keys that name tree nodes (path hashes).
    """

    def __init__(
        self,
        capacity: int,
        num_tree_slots: int = NUM_TREE_SLOTS,
        *,
        lane: int = 0,
        windows: Sequence[AttentionWindow] = (),
    ) -> None:
        """Lay out an empty lane of `capacity` slots.

        windows  the model's attention windows
        """
        assert 0 < num_tree_slots <= capacity
        self.lane = lane
        self.windows = tuple(windows)
        self.capacity = capacity
        self.num_tree_slots = num_tree_slots
        # Number of committed tokens in the cache. Tree nodes have places only while no committed
        # token is missing from it.
        self.prefix_len = 0
        self.fed_len = 0  # the first so many were computed as committed tokens, not as tree nodes
        self._places: dict[K, _Place] = {}
        self._taken = 0  # bit i: slot prefix_len + i is taken by a node of `_places`

    def __contains__(self, key: K) -> bool:
        """Return True if the tree node `key` has a slot in the cache."""
        return key in self._places

    @property
    def num_free(self) -> int:
        """Return the number of free tree slots."""
        within = min(self.num_tree_slots, self.capacity - self.prefix_len)
        return within - len(self._places)

    def truncate(self, length: int) -> None:
        """Forget the tree and every committed token from position `length` on."""
        self._places.clear()
        self._taken = 0
        self.prefix_len = min(self.prefix_len, length)
        self.fed_len = min(self.fed_len, length)

    def adopt(self, length: int) -> None:
        """Count the first `length` committed tokens as cached: they were copied from another lane.

        Only the count changes here; the caller copies the slots (`Executor.copy_prefix`).
        """
        assert not self._places, "a copy comes before any node"
        assert self.prefix_len < length <= self.capacity
        self.prefix_len = self.fed_len = length

    def next_chunk(self, text: Sequence[int], end: int, chunk_len: int) -> Sequence[int]:
        """Return the tokens of text[:end] to prefill next, at most `chunk_len`.

        Returns () if at most `MAX_MISSING` tokens are missing, which `feed` takes along.
        """
        if end - self.prefix_len <= MAX_MISSING:
            return ()
        return text[self.prefix_len : min(end, self.prefix_len + chunk_len)]

    def feed_prefix(self, tokens: Sequence[int]) -> Feed:
        """Assign slots after the prefix to committed `tokens`; return them as a prefill chunk."""
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
        """Assign slots to uncached committed tokens and to tree nodes; return them as one pass.

        missing    committed tokens from position prefix_len - num_again on (few: they share the
                   tree's mask word)
        nodes      per node (key, parent's key or None for the last committed token, token id,
                   position), parents before children
        num_again  number of tokens at the start of `missing` that are cached already and are
                   computed again in the same slots (a head knows more about them now); tree nodes
                   that exist keep their slots

        After the call all these tokens count as cached: the device works in order, so nothing that
        is launched later can see an unwritten slot.
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
            place = self._allocate(key, above, position)
            before.append(self.prefix_len - 1 if above is None else above.slot)
            masks.append(place.mask << count | missing_mask)
            tokens.append(token)
            positions.append(position)
            slots.append(place.slot)
        assert max(masks).bit_length() <= NUM_TREE_SLOTS, "the rows of a pass share one mask word"
        rows = tuple(tokens), tuple(positions), tuple(slots), start, tuple(masks)
        near = self._near(start, positions, masks) if self.windows else ()
        return Feed(*rows, self.lane, tuple(before), near=near)

    def _near(
        self, start: int, positions: Sequence[int], masks: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        """Return, per window, the masks without ancestors before it; () if there are none.

        start  the slot that bit 0 of `masks` stands for; slots up to the prefix are positions
        """
        rows = tuple(zip(positions, masks, strict=True))
        lowest = [[window.lowest(position) for position, _ in rows] for window in self.windows]
        if max(map(max, lowest)) <= start:
            return ()  # the usual case: a window is longer than a tree is deep
        found = [
            tuple(
                mask & ~self._bits_before(low, start)
                for low, (_, mask) in zip(of_window, rows, strict=True)
            )
            for of_window in lowest
        ]
        return tuple(found) if any(near != tuple(masks) for near in found) else ()

    def _bits_before(self, position: int, start: int) -> int:
        """Return bits of the tokens before `position` that lie in slots from `start` on."""
        if position <= start:
            return 0
        bits = (1 << min(position, self.prefix_len) - start) - 1
        for place in self._places.values():
            if place.position < position:
                bits |= 1 << place.slot - start
        return bits

    def rename(self, key: K, to: K | None) -> None:
        """Give node `key` the key `to`; None: remove it and free its slot. No `key`: do nothing.

        Used for nodes that are fed under a provisional key.
        """
        if (place := self._places.pop(key, None)) is None:
            return
        if to is None:
            self._taken ^= 1 << (place.slot - self.prefix_len)
        else:
            self._places[to] = place

    def _allocate(self, key: K, above: _Place | None, position: int) -> _Place:
        """Assign the lowest free tree slot to a new node and return it with the node's mask.

        above  its parent's place; None: the parent is the last committed token
        """
        assert key not in self._places, "a node is fed once"
        own = ~self._taken & (self._taken + 1)
        index = own.bit_length() - 1
        assert index < self.num_tree_slots, "no free tree slot"
        assert self.prefix_len + index < self.capacity, "the cache is full"
        mask = own if above is None else above.mask | own
        place = _Place(self.prefix_len + index, position, mask)
        self._places[key] = place
        self._taken |= own
        return place

    def advance(self, path: Sequence[K], survivors: Container[K]) -> Move | None:
        """Commit the nodes of `path`; return the copy that the cache must make, or None.

        path       keys from the first node after the last committed token downwards; those from
                   the first uncached one on stay missing, and the caller feeds them again
        survivors  keys of the nodes that stay in the tree; the slots of all others become free
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
        """Make masks relative to `new_prefix`, move nodes out of slots below it; return the moves.

        Returns the moves as {old slot: new slot}.
        """
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
    """How a cache is divided into lanes (one per text).

    count      number of lanes
    num_slots  slots of one lane, its scratch slots included
    """

    count: int
    num_slots: int

    @property
    def total(self) -> int:
        """Return the number of slots of the whole cache."""
        return self.count * self.num_slots

    def first_slot(self, lane: int) -> int:
        """Return the index in the whole cache of a lane's first slot."""
        assert 0 <= lane < self.count, f"lane {lane}, but the cache has {self.count}"
        return lane * self.num_slots


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a pass that belong to one lane.

    first_slot  where the lane begins: its slot s is slot first_slot + s of the cache
    num_rows    number of these rows
    """

    first_slot: int
    num_rows: int


def is_grid(spans: Sequence[Span]) -> bool:
    """True if all spans have equally many rows and their lanes lie at equal distances.

    Then one strided view of the cache covers the lanes.
    """
    if len({span.num_rows for span in spans}) > 1:
        return False
    return len({after.first_slot - before.first_slot for before, after in pairwise(spans)}) <= 1


def in_steps(num_slots: int) -> int:
    """Return a number of slots rounded up to a multiple of `SLOT_STEP`."""
    return -(-num_slots // SLOT_STEP) * SLOT_STEP


def lane_counts(num_lanes: int) -> tuple[int, ...]:
    """Return the numbers of lanes that a pass is padded to: 1, 2, 4, 8, ... and `num_lanes`."""
    return (*(1 << power for power in range((num_lanes - 1).bit_length())), num_lanes)


def copied(moves: Iterable[Move], lanes: LaneLayout) -> tuple[list[int], list[int]]:
    """Return the source and target slots of several lanes' moves, as slots of the whole cache."""
    sources: list[int] = []
    targets: list[int] = []
    for move in moves:
        first = lanes.first_slot(move.lane)
        sources += (first + slot for slot in move.sources)
        targets += (first + slot for slot in move.targets)
    return sources, targets
