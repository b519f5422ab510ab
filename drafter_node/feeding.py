"""How the committed text goes into the drafter's cache: for a model, and for a head (pure)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

from engine.layout.slots import MAX_MISSING, Feed, SlotMap
from proto.messages import Features
from proto.tree import CommittedText

# -- given -----------------------------------------------------------------------------------------

# The target's features (hidden states), which a head reads beside the tokens.
#
# Theory of operation
# -------------------
# A head has no full model of its own: at each token it reads the token and the target's *feature*
# before it (`proto.messages.Features`). The features of committed tokens come from the target, in a
# message ahead of the verdict with these tokens. Those of drafts are predicted by the head. So
#
#     the prompt         is read as far as its features have come
#     the root           is expanded once its feature has come: before, it could only be guessed
#     a lost feature     leaves a row that no other row sees; drafting goes on with the next verdict
#
# A message names the path of its tokens by a hash. If that path is not, or not yet, the text here,
# the message is dropped, or kept for a while; so late and repeated messages, and those of other
# lives, do no harm.

MAX_EARLY = 64  # messages about tokens that are not known yet; one at a time is usual
PREDICTED = b""  # in the place of a row's feature: the head reads its own prediction


class Given:
    """The target's features of one life of a text that have come and were not read yet.

    dtype        type of their numbers; "": none have come
    has_verdict  True: a verdict has come, so that no features of the tokens before it are still on
                 their way
    """

    def __init__(self, text: CommittedText) -> None:
        self.dtype = ""
        self._text = text
        self._rows: dict[int, bytes] = {}  # by position: the feature before the token there
        self._early: deque[Features] = deque(maxlen=MAX_EARLY)
        self.has_verdict = False

    def heard(self, message: Features) -> None:
        """Keep the features of a message, if they are of this text or may be later."""
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
        """Note that a verdict has come; features that came early may now be of this text."""
        self.has_verdict = True
        early, self._early = self._early, deque(maxlen=MAX_EARLY)
        for message in early:
            self.heard(message)

    def readable_len(self, start: int) -> int:
        """Return how many tokens of the text may be read now, if those before `start` were read.

        Before the first verdict: as far as features have come without a gap. Afterwards: the whole
        text, but not a last token without a feature. The first token of a text has no feature.
        """
        length = len(self._text)
        if self.has_verdict:
            return length if length - 1 in self._rows else length - 1
        end = max(start, 1)
        while end < length and end in self._rows:
            end += 1
        return end if end > 1 else 0

    def take(self, start: int, end: int) -> tuple[bytes | None, ...]:
        """Take and return the features before tokens at [start, end); None where none came.

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

Rows = Sequence[tuple[int, int | None, int, int]]  # nodes, as `SpeculationTree.rows_of` returns


class Change(Enum):
    """What a verdict changes about rows that are cached already."""

    NONE = auto()
    ROOT = auto()  # a head has a better feature for the root: the root is expanded once more
    ALL = auto()  # so many tokens must be read again that no draft can stay


class Reading:
    """How an ordinary draft model reads a text: by its tokens, so that cached rows stay valid.

    dtype     type of the features that feeds carry; "": they carry none
    is_ready  True if enough of the root is known to draft after it
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
        """Handle a message with features; a model needs none."""

    def moved(self) -> Change:
        """Note that the text is longer; returns which cached rows are affected.

        Called after `SlotMap.advance`.
        """
        return Change.NONE

    def chunk(self, limit: int) -> Sequence[int]:
        """Return the tokens to prefill next, at most `limit`; empty if `feed` can take them all."""
        return self._slots.next_chunk(self._text.tokens, len(self._text), limit)

    def feed_chunk(self, chunk: Sequence[int]) -> Feed:
        """Return the Feed that prefills this chunk."""
        return self._slots.feed_prefix(chunk)

    def feed(self, rows: Rows) -> Feed:
        """Return the Feed of the committed tokens that the cache lacks, and of these nodes."""
        return self._slots.feed(self._text.tokens[self._slots.prefix_len :], rows)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""


class HeadReading(Reading):
    """How a head reads a text: by its tokens and the target's features (`Given`).

    Drafts that are now committed were cached with features that the head had predicted. When the
    root is expanded, these tokens are fed once more to the same slots, with the target's features;
    the tree below stays as it is.
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
