"""The target's features, which a drafter that is a head reads beside the tokens (pure).

Theory of operation
-------------------
Such a drafter has no model of the text of its own: at each token it reads the token and the
target's *feature* before it (`proto.messages.Features`). Those of committed tokens come from the
target, a message ahead of the verdict that has the tokens, and those of drafts the head predicts
by itself. So

    the prompt     is read as far as its features have come
    the root       is expanded once its feature is there, and not before: all else would be guessed
    a lost one     leaves a row that nobody sees; drafting goes on from the next verdict on

What a message says is of a path, by its hash: what is not, or not yet, the text here is kept for a
while or dropped, so late and repeated messages, and those of other lives, do no harm.
"""

from collections import deque

from proto.messages import Features
from proto.tree import CommittedText

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

    def of(self, start: int, end: int) -> tuple[bytes | None, ...]:
        """The features before the tokens at these positions; None where none has come.

        They are not asked for again.
        """
        found = tuple(self._rows.get(position) for position in range(start, end))
        self._rows = {position: row for position, row in self._rows.items() if position >= end}
        return found

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert all(0 < position < len(self._text) for position in self._rows)
        assert all(message.end_len > len(self._text) for message in self._early)
