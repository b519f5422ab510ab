"""What of the committed text goes into the cache, and how: of a model, and of a head (pure)."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

from drafter_node.given import PREDICTED, Given
from engine.slots import MAX_MISSING, Feed, SlotMap
from proto.messages import Features
from proto.tree import CommittedText

Rows = Sequence[tuple[int, int | None, int, int]]  # of nodes, as `SpeculationTree.rows_of` has them


class Change(Enum):
    """What a verdict makes of rows that are cached."""

    NONE = auto()
    ROOT = auto()  # more is known of the root: it is worth expanding once more
    ALL = auto()  # too much is to be read again for any draft to stay


class Reading:
    """An ordinary model reads tokens: what is cached stays true.

    dtype     of the features that feeds carry; "": they carry none
    is_ready  whether what is known of the root is enough to draft behind it
    """

    def __init__(self, slots: SlotMap[int], text: CommittedText) -> None:
        self._slots = slots
        self._text = text

    @property
    def dtype(self) -> str:
        return ""

    @property
    def is_ready(self) -> bool:
        return True

    def heard(self, message: Features) -> None:
        """Features have come."""

    def moved(self) -> Change:
        """The text is longer, and `SlotMap.advance` has been told."""
        return Change.NONE

    def chunk(self, limit: int) -> Sequence[int]:
        """What is to be prefilled next, at most so much; empty if a forward can take it."""
        return self._slots.next_chunk(self._text.tokens, len(self._text), limit)

    def feed_chunk(self, chunk: Sequence[int]) -> Feed:
        """Prefill it."""
        return self._slots.feed_prefix(chunk)

    def feed(self, rows: Rows) -> Feed:
        """What the cache lacks of the text, and these nodes."""
        return self._slots.feed(self._text.tokens[self._slots.prefix_len :], rows)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""


class HeadReading(Reading):
    """A head reads tokens and features (`given.py`).

    What was drafted and is now committed was cached with predicted features. It is fed once more
    with the target's, in its place, when the root is expanded; the tree below stays as it is.
    """

    def __init__(self, slots: SlotMap[int], text: CommittedText) -> None:
        super().__init__(slots, text)
        self._given = Given(text)

    @property
    def dtype(self) -> str:
        return self._given.dtype

    @property
    def is_ready(self) -> bool:
        start, length = self._slots.fed_len, len(self._text)
        return start == length or self._given.readable_len(start) == length

    def heard(self, message: Features) -> None:
        self._given.heard(message)

    def moved(self) -> Change:
        self._given.moved()
        if len(self._text) - self._slots.fed_len > MAX_MISSING:
            self._slots.truncate(self._slots.fed_len)
            return Change.ALL
        return Change.ROOT if self._slots.fed_len < self._slots.prefix_len else Change.NONE

    def chunk(self, limit: int) -> Sequence[int]:
        start, length = self._slots.fed_len, len(self._text)
        end = self._given.readable_len(start)
        is_all_there = end == length or self._given.has_verdict
        if end - start <= (MAX_MISSING if is_all_there else 0):
            return ()
        return self._text.tokens[start : min(end, start + limit)]

    def feed_chunk(self, chunk: Sequence[int]) -> Feed:
        start = self._slots.fed_len
        self._slots.truncate(start)
        return self._with_features(super().feed_chunk(chunk), start)

    def feed(self, rows: Rows) -> Feed:
        start = self._slots.fed_len
        missing, num_again = self._text.tokens[start:], self._slots.prefix_len - start
        return self._with_features(self._slots.feed(missing, rows, num_again=num_again), start)

    def _with_features(self, feed: Feed, start: int) -> Feed:
        end = self._slots.fed_len
        features = self._given.of(start, end)
        num_nodes = len(feed.tokens) - len(features)
        return replace(feed, features=(*features, *[PREDICTED] * num_nodes))

    def check(self) -> None:
        self._given.check()
