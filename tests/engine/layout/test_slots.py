"""The layout of the cache against a toy cache that remembers which text each slot stands for."""

import pytest

from engine.layout.attention_windows import AttentionWindow, LayerKinds
from engine.layout.slots import Feed, Move, SlotMap
from tests.engine.random_session import Drawn, Path, RandomSession


class ToyCache:
    """Slots that hold the whole path of their token."""

    def __init__(self, capacity: int) -> None:
        self.cells: list[Path | None] = [None] * capacity

    def run(self, step: Drawn) -> None:
        feed = step.feed
        for slot, path, token in zip(feed.slots, step.paths, feed.tokens, strict=True):
            assert path[-1] == token
            self.cells[slot] = path
        for row, path in enumerate(step.paths):
            seen = visible_slots(feed, row)
            assert max(seen) < feed.total
            assert feed.positions[row] == len(path) - 1
            above = feed.before[row]
            assert (self.cells[above] if above >= 0 else ()) == path[:-1]
            texts = sorted((self.cells[slot] or () for slot in seen), key=len)
            assert texts == [path[: i + 1] for i in range(len(path))]

    def move(self, move: Move) -> None:
        rows = [self.cells[source] for source in move.sources]
        for target, row in zip(move.targets, rows, strict=True):
            self.cells[target] = row


def visible_slots(feed: Feed, row: int) -> list[int]:
    if feed.masks is None:
        return list(range(feed.slots[row] + 1))
    return [*range(feed.prefix_len), *after_prefix(feed.prefix_len, feed.masks[row])]


def after_prefix(prefix_len: int, bits: int) -> list[int]:
    return [prefix_len + i for i in range(bits.bit_length()) if bits >> i & 1]


@pytest.mark.parametrize("num_tree_slots", [24, 64])
@pytest.mark.parametrize("seed", range(60))
def test_every_row_sees_exactly_its_own_path(seed: int, num_tree_slots: int) -> None:
    slots: SlotMap[Path] = SlotMap(400, num_tree_slots)
    session = RandomSession(seed, slots, vocab=5, prompt_len=seed % 40 + 1)
    cache = ToyCache(slots.capacity)
    num_moves = 0
    for step in session.steps(80):
        if isinstance(step, Move):
            cache.move(step)
            num_moves += 1
        else:
            cache.run(step)
    assert num_moves > 3
    committed = cache.cells[: slots.prefix_len]
    assert committed == [session.text[: i + 1] for i in range(slots.prefix_len)]


@pytest.mark.parametrize("window", [AttentionWindow(3), AttentionWindow(5, is_chunk=True)])
@pytest.mark.parametrize("seed", range(20))
def test_in_a_window_a_row_sees_the_end_of_its_path(seed: int, window: AttentionWindow) -> None:
    other = AttentionWindow(200)
    slots: SlotMap[Path] = SlotMap(400, windows=(other, window))
    session = RandomSession(seed, slots, vocab=5, prompt_len=seed + 1)
    cache = ToyCache(slots.capacity)
    num_cut = 0
    for step in session.steps(60):
        if isinstance(step, Move):
            cache.move(step)
            continue
        cache.run(step)
        feed = step.feed
        num_cut += bool(feed.near)
        if feed.masks is None:
            assert not feed.near
            continue
        far, near = feed.near or (feed.masks, feed.masks)
        assert far == feed.masks
        for row, path in enumerate(step.paths):
            lowest = window.lowest(len(path) - 1)
            seen = [
                *range(min(lowest, feed.prefix_len), feed.prefix_len),
                *after_prefix(feed.prefix_len, near[row]),
            ]
            want = [path[: i + 1] for i in range(lowest, len(path))]
            assert sorted(cache.cells[slot] for slot in seen) == want
    assert num_cut > 5


def test_a_window_that_no_text_is_longer_than_is_full_attention() -> None:
    kinds = LayerKinds.of([AttentionWindow(100), None, AttentionWindow(8), None])
    assert kinds.seen == (None, AttentionWindow(8), AttentionWindow(100))
    assert kinds.of_layers == (2, 0, 1, 0)
    assert kinds.numbers == (None, 0, 1)
    assert kinds.within(101) == kinds
    assert kinds.within(100) == LayerKinds.of([None, None, AttentionWindow(8), None])
    assert kinds.within(8).is_uniform
    assert not kinds.within(8).windows


def test_a_pass_covers_a_parent_that_lies_behind_its_child() -> None:
    slots: SlotMap[str] = SlotMap(100)
    slots.feed([1, 2, 3])
    slots.feed((), [("a", None, 7, 3), ("b", None, 8, 3), ("c", "b", 9, 4)])
    assert slots.advance(["b"], ["c"]) == Move((4,), (3,))
    feed = slots.feed((), [("d", "c", 6, 5)])
    assert feed == Feed((6,), (5,), (4,), 4, (0b11,), before=(5,))
    assert feed.total == 6  # c lies in slot 5


def test_committing_a_chain_moves_nothing() -> None:
    slots: SlotMap[str] = SlotMap(100)
    slots.feed([1, 2])
    slots.feed((), [("a", None, 3, 2), ("b", "a", 4, 3), ("c", "b", 5, 4)])
    assert slots.advance(["a", "b"], ["c"]) is None
    assert slots.prefix_len == 4
    assert slots.num_free == 63


def test_a_dead_node_gives_its_slot_back() -> None:
    slots: SlotMap[str] = SlotMap(10, 4)
    slots.feed([1])
    slots.feed((), [(name, None, 2, 1) for name in "abcd"])
    assert slots.num_free == 0
    assert slots.advance(["e"], ()) is None
    assert slots.num_free == 4


def test_the_tree_region_ends_with_the_cache() -> None:
    slots: SlotMap[str] = SlotMap(10, 8)
    slots.feed_prefix(range(7))
    assert slots.num_free == 3


def test_feeding_beyond_the_tree_region_is_refused() -> None:
    slots: SlotMap[str] = SlotMap(10, 2)
    with pytest.raises(AssertionError, match="mask word"):
        slots.feed((), [(name, None, 2, 0) for name in "abc"])
