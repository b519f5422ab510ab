"""Where the texts of a node lie in its cache: a lane each (pure).

A lane outlives its texts: what is cached of the last one is kept, and the next text that begins
alike goes on from there, or takes a copy of it. The device works in order, so that holds also for a
lane whose last pass is still running.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from engine.layout.slots import MAX_MISSING, NUM_TREE_SLOTS, SlotMap
from node.events import CopyPrefix
from proto.messages import SESSION_KEY_BYTES, Open
from proto.tree import CommittedText

MIN_COPIED = 32  # tokens; fewer are read again as quickly


class Lane:
    """One lane.

    slots  its layout
    text   whose first `slots.prefix_len` tokens are cached; that of the text that is open in it
    """

    def __init__(self, number: int, num_slots: int, *, is_head: bool = False) -> None:
        # A head reads tokens once more beside its tree.
        num_tree_slots = NUM_TREE_SLOTS - MAX_MISSING if is_head else NUM_TREE_SLOTS
        self.slots: SlotMap[int] = SlotMap(num_slots, num_tree_slots, lane=number)
        self._is_head = is_head
        self.text = CommittedText(bytes(SESSION_KEY_BYTES))

    def num_cached_of(self, tokens: Sequence[int]) -> int:
        """How many tokens of a text are cached here."""
        # What a head drafted itself it has read without the target's features.
        num_cached = self.slots.fed_len if self._is_head else self.slots.prefix_len
        return min(num_cached, self.text.common_len(tokens))

    def begin(self, text: CommittedText, *, keep: bool = True) -> None:
        """A text begins here, or begins anew. keep: with what is cached of it."""
        # The last token is always fed again.
        kept = min(self.num_cached_of(text.tokens), len(text) - 1) if keep else 0
        self.slots.truncate(kept)
        self.text = text


class Reader(Protocol):
    """A text that is not all in its lane yet.

    may_copy  its lane may have what another has computed
    """

    opened: Open
    lane: Lane

    @property
    def may_copy(self) -> bool: ...


Text = TypeVar("Text", bound=Reader)


def next_reader(readers: Sequence[Text]) -> Text | None:
    """The first that has something to read by itself.

    One that begins as an older one does waits until that one is read, and takes a copy.
    """
    return next((one for one in readers if not _has_elder(one, readers)), None)


def _has_elder(reader: Reader, readers: Sequence[Reader]) -> bool:
    if not reader.may_copy:
        return False
    tokens, num_read = reader.lane.text.tokens, reader.lane.slots.prefix_len
    return any(
        other.opened.session < reader.opened.session
        and other.lane.text.common_len(tokens) - num_read > MIN_COPIED
        for other in readers
    )


class Lanes:
    """All lanes of a node.

    is_head  what runs in them reads a target's features
    """

    def __init__(self, count: int, num_slots: int, *, is_head: bool = False) -> None:
        self._lanes = [Lane(number, num_slots, is_head=is_head) for number in range(count)]
        self._taken: list[Lane] = []

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def num_free(self) -> int:
        """Texts that can still be opened."""
        return len(self._lanes) - len(self._taken)

    def take(self, tokens: Sequence[int], key: bytes) -> Lane:
        """The free lane that the text of this key was in, or else the one that has most of it; of
        several, or if none has much, the one that was free for longest."""

        def suits(lane: Lane) -> tuple[bool, int]:
            num_cached = lane.num_cached_of(tokens)
            # All texts begin with the same few tokens: for those no lane is worth taking.
            return lane.text.key == key, num_cached if num_cached >= MIN_COPIED else 0

        lane = max((lane for lane in self._lanes if lane not in self._taken), key=suits)
        self._taken.append(lane)
        return lane

    def give_back(self, lane: Lane) -> None:
        """Its text is closed."""
        self._taken.remove(lane)
        # The next text without a beginning here takes what was not used for longest.
        self._lanes.remove(lane)
        self._lanes.append(lane)

    def copy_for(self, lane: Lane, tokens: Sequence[int]) -> CopyPrefix | None:
        """What another lane has of a text and its own has not; from now on it has it."""
        # The last token is always fed again.
        best = max(self._lanes, key=lambda other: other.num_cached_of(tokens))
        length = min(best.num_cached_of(tokens), len(tokens) - 1)
        if best is lane or length < lane.slots.prefix_len + MIN_COPIED:
            return None
        lane.slots.adopt(length)
        return CopyPrefix(best.slots.lane, lane.slots.lane, length)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert len(set(map(id, self._taken))) == len(self._taken), "a lane is given to two texts"
        for lane in self._lanes:
            lane.slots.check()
            assert lane.slots.prefix_len <= len(lane.text) or not lane.text.tokens
