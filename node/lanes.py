"""The lanes of a node's KV cache: which text uses which, and what of it is cached there (pure)."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from engine.layout.attention_windows import AttentionWindow
from engine.layout.slots import MAX_MISSING, NUM_TREE_SLOTS, SlotMap
from node.events import CopyPrefix
from proto.messages import (
    SESSION_KEY_BYTES,
    Open,
)
from proto.tree import CommittedText

MIN_COPIED = 32  # tokens; to read fewer again takes no longer than to copy them
# Last tokens of a prompt that are read again, if a text wants hidden states of layers (for a head)
# and these were not handed out when the tokens were read. Without any of them the head of a chat
# model had a third less of its drafts accepted (docs/LOG.md); all of a long prompt takes too long.
READ_AGAIN = 128
# Last tokens of a text that ended whose hidden states the head may not have used any more: more
# than a pass decides. They are read again as well, else the head would lack rows between others.
TOLD_LATE = 32


class Lane:
    """The part of the KV cache that one text uses: which tokens are cached in it, and where.

    slots  which slot holds which token
    text   the text whose first `slots.prefix_len` tokens are cached; while a text is open in this
           lane, that text
    layers the layers whose hidden states that text wants, or wanted
    """

    def __init__(
        self,
        number: int,
        num_slots: int,
        *,
        is_head: bool = False,
        windows: Sequence[AttentionWindow] = (),
    ) -> None:
        # A head reads some committed tokens a second time; they need slots beside its tree.
        num_tree_slots = NUM_TREE_SLOTS - MAX_MISSING if is_head else NUM_TREE_SLOTS
        self.slots: SlotMap[int] = SlotMap(num_slots, num_tree_slots, lane=number, windows=windows)
        self._is_head = is_head
        self.text = CommittedText(bytes(SESSION_KEY_BYTES))
        self.layers: tuple[int, ...] = ()

    def num_cached_of(self, tokens: Sequence[int]) -> int:
        """Return how many tokens at the beginning of a text are cached in this lane."""
        # A head has read its own drafts without the target's features, so those do not count.
        num_cached = self.slots.fed_len if self._is_head else self.slots.prefix_len
        return min(num_cached, self.text.common_len(tokens))

    def copied(self, copy: CopyPrefix) -> None:
        """Note a copy to this lane: its slots count as filled from now on."""
        assert copy.target == self.slots.lane
        self.slots.adopt(copy.length)

    def begin(
        self, text: CommittedText, *, keep: bool = True, layers: tuple[int, ...] = ()
    ) -> None:
        """Begin a text in this lane, or begin it anew; keep=False drops what is cached of it.

        layers  whose hidden states the text wants
        """
        kept = self.num_kept_of(text.tokens, layers) if keep else 0
        self.slots.truncate(kept)
        self.text, self.layers = text, layers

    def num_kept_of(self, tokens: Sequence[int], layers: tuple[int, ...]) -> int:
        """Return how many cached tokens of a text need not be read again.

        layers  whose hidden states the text wants
        """
        # The last token is always fed again.
        kept = min(self.num_cached_of(tokens), len(tokens) - 1)
        if not layers:
            return kept
        told = len(self.text) - TOLD_LATE if layers == self.layers else len(tokens) - READ_AGAIN
        # A head that has cached as much wants the hidden state before the next token.
        return max(0, min(kept, told) - 1)


class Reader(Protocol):
    """A text of which some tokens are not in its lane yet.

    may_copy  True: tokens that are cached in another lane may be copied into its lane
    """

    opened: Open
    lane: Lane

    @property
    def may_copy(self) -> bool: ...


AnyReader = TypeVar("AnyReader", bound=Reader)


def next_reader(readers: Sequence[AnyReader]) -> AnyReader | None:
    """Return the first text that has to read tokens itself; None if there is none.

    A text that begins like an older one waits until the older one is read, and then copies it.
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
    """All lanes of a node, and which of them are in use.

    is_head  True: the model in them is a head, which reads a target's features
    windows  the model's attention windows
    """

    def __init__(
        self,
        count: int,
        num_slots: int,
        *,
        is_head: bool = False,
        windows: Sequence[AttentionWindow] = (),
    ) -> None:
        self._lanes = [
            Lane(number, num_slots, is_head=is_head, windows=windows) for number in range(count)
        ]
        self._taken: list[Lane] = []

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def num_free(self) -> int:
        """Return the number of lanes that are free: as many more texts can be opened."""
        return len(self._lanes) - len(self._taken)

    def take(self, tokens: Sequence[int], key: bytes) -> Lane:
        """Return a free lane for a text, and mark it as in use.

        It is the lane in which the text with this key was before; else the one that has cached most
        of its tokens; of several, or if none has cached much, the one that has been free for
        longest.
        """

        def suits(lane: Lane) -> tuple[bool, int]:
            num_cached = lane.num_cached_of(tokens)
            # All texts begin with the same few tokens: those alone are no reason to take a lane.
            return lane.text.key == key, num_cached if num_cached >= MIN_COPIED else 0

        lane = max((lane for lane in self._lanes if lane not in self._taken), key=suits)
        self._taken.append(lane)
        return lane

    def give_back(self, lane: Lane) -> None:
        """Mark a lane as free: its text is closed."""
        self._taken.remove(lane)
        # To the end: a text of which nothing is cached takes the lane that was unused for longest.
        self._lanes.remove(lane)
        self._lanes.append(lane)

    def copy_for(self, lane: Lane, tokens: Sequence[int]) -> CopyPrefix | None:
        """Return a copy to `lane` if another lane has cached enough more of a text; else None.

        Whoever makes it tells the lane (`Lane.copied`).
        """
        wanted = lane.layers
        best = max(self._lanes, key=lambda other: other.num_kept_of(tokens, wanted))
        length = best.num_kept_of(tokens, wanted)
        if best is lane or length < lane.slots.prefix_len + MIN_COPIED:
            return None
        return CopyPrefix(best.slots.lane, lane.slots.lane, length)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert len(set(map(id, self._taken))) == len(self._taken), "a lane is given to two texts"
        for lane in self._lanes:
            lane.slots.check()
            assert lane.slots.prefix_len <= len(lane.text) or not lane.text.tokens
