"""What of the committed text goes into the cache, and how: of a model, and of a head (pure)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

from engine.layout.slots import MAX_MISSING, Feed, SlotMap
from proto.messages import Features
from proto.tree import CommittedText

# -- given -----------------------------------------------------------------------------------------

# The target's features, which a drafter that is a head reads beside the tokens.
#
# Theory of operation
# -------------------
# Such a drafter has no model of the text of its own: at each token it reads the token and the
# target's *feature* before it (`proto.messages.Features`). Those of committed tokens come from the
# target, a message ahead of the verdict that has the tokens, and those of drafts the head predicts
# by itself. So
#
#     the prompt     is read as far as its features have come
#     the root       is expanded once its feature is there: all else would be guessed
#     a lost one     leaves a row that nobody sees; drafting goes on from the next verdict on
#
# What a message says is of a path, by its hash: what is not, or not yet, the text here is kept for
# a while or dropped, so late and repeated messages, and those of other lives, do no harm.

MAX_EARLY = 64  # messages about tokens that are not known yet; one at a time is usual
PREDICTED = b""  # of a row: read the head's own prediction


class Given:
    """Features of one life of a text that have come and were not read yet.

    dtype        of their numbers; "": none has come
    has_verdict  one has come: nothing about the tokens before it is still on its way
    """

    def __init__(self, text: CommittedText) -> None:
        self.dtype = ""
        self._text = text
        self._rows: dict[int, bytes] = {}  # by position: the feature before the token there
        self._early: deque[Features] = deque(maxlen=MAX_EARLY)
        self.has_verdict = False

    def heard(self, message: Features) -> None:
        """A message has come."""
        if message.end_len > len(self._text):
            self._early.append(message)
        elif self._text.is_prefix(message.end_len, message.end_hash):
            self._take(message)

    def _take(self, message: Features) -> None:
        self.dtype = message.dtype
        size = len(message.data) // message.num_rows
        first = message.end_len - message.num_rows
        for index in range(message.num_rows):
            self._rows[first + index] = message.data[index * size : (index + 1) * size]

    def moved(self) -> None:
        """A verdict has come, and the text may be longer."""
        self.has_verdict = True
        early, self._early = self._early, deque(maxlen=MAX_EARLY)
        for message in early:
            self.heard(message)

    def readable_len(self, start: int) -> int:
        """How much of the text may be read now, if that before `start` was.

        Before the first verdict as far as features have come without a gap; afterwards all of it,
        but for a last token without one. The first token of a text has none.
        """
        length = len(self._text)
        if self.has_verdict:
            return length if length - 1 in self._rows else length - 1
        end = max(start, 1)
        while end < length and end in self._rows:
            end += 1
        return end if end > 1 else 0

    def take(self, start: int, end: int) -> tuple[bytes | None, ...]:
        """The features before the tokens at these positions; None where none has come.

        They, and all before them, are forgotten.
        """
        found = tuple(self._rows.get(position) for position in range(start, end))
        self._rows = {position: row for position, row in self._rows.items() if position >= end}
        return found

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert all(0 < position < len(self._text) for position in self._rows)
        assert all(message.end_len > len(self._text) for message in self._early)


# -- reading ---------------------------------------------------------------------------------------

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
    """A head reads tokens and features (`Given`).

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
        features = self._given.take(start, end)
        num_nodes = len(feed.tokens) - len(features)
        return replace(feed, features=(*features, *[PREDICTED] * num_nodes))

    def check(self) -> None:
        self._given.check()
