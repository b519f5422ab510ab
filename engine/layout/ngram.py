"""Drafts without a model: what followed the last few tokens when they were seen before (pure).

Theory of operation
-------------------
The last n tokens of the text are looked up in what was written before, and what followed them there
is the draft: prompt lookup (Saxena 2023). A reference text to copy from can be given besides (LLMA,
Yang et al., arXiv 2304.04487).

    which n      the largest, from `ngram_max` down to `ngram_min`, whose n-gram occurs with
                 something behind it
    which place  one with the longest continuation, counted up to the length that is wanted; of
                 several one is drawn by a hash of the seed and of the text's length, so a text has
                 the same draft in every process and every life

A table maps an n-gram to the places where it ends, ascending. A lookup is at most `ngram_max`
probes and a bisection each, a token costs `ngram_max` insertions, however long the text is. An
n-gram is one integer, exact: a leading 1 and 32 bits for each token. The reference has a table and
tokens of its own, so no n-gram and no continuation bridges from it into the text.

Memory is bounded: the text is indexed in blocks, and only the last two are kept. A block begins at
a multiple of its length, so what is forgotten depends on the text alone.
"""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

BLOCK_LEN = 1 << 16

_BITS_64 = (1 << 64) - 1
# n-gram -> where it ends: the number of tokens up to there. Most occur once, and a list of one
# would take three times the memory, and the time of the garbage collector.
_Table = dict[int, int | list[int]]


@dataclass(frozen=True, slots=True)
class Match:
    """What followed the last `ngram_len` tokens in another place; at least one token."""

    tokens: tuple[int, ...]
    ngram_len: int


class NgramIndex:
    """A text that grows, where each of its n-grams ends, and a reference to copy from."""

    def __init__(
        self, *, ngram_min: int, ngram_max: int, seed: int, reference: Sequence[int] = ()
    ) -> None:
        assert 1 <= ngram_min <= ngram_max
        self.ngram_min = ngram_min
        self.ngram_max = ngram_max
        self.reference = tuple(reference)
        self.tokens: list[int] = []
        self._key = (seed & _BITS_64).to_bytes(8, "little")
        self._in_reference = _table(self.reference, ngram_min, ngram_max)
        self._in_text: _Table = {}  # n-grams that end in the block that is being filled
        self._in_text_before: _Table = {}  # and in the one before it

    def __len__(self) -> int:
        """Number of tokens of the text."""
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on with `tokens`."""
        for token in tokens:
            if len(self.tokens) % BLOCK_LEN == 0:
                self._in_text_before, self._in_text = self._in_text, {}
            self.tokens.append(token)
            for _, ngram in self._ngrams(self.tokens):
                _add(self._in_text, ngram, len(self.tokens))

    def find(self, limit: int, path: Sequence[int] = ()) -> Match | None:
        """At most `limit` tokens that may follow the text and `path`, which is not indexed.

        None: nothing that the text and the path end with has been seen with something behind it.
        """
        assert limit >= 1
        length = len(self.tokens) + len(path)
        recent = [*self.tokens[-self.ngram_max :], *path][-self.ngram_max :]
        for ngram_len, ngram in reversed(self._ngrams(recent)):
            tokens = self._continuation(ngram, limit, length)
            if tokens:
                return Match(tokens, ngram_len)
        return None

    def _ngrams(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Length and value of the n-grams that `tokens` end with, the shortest first."""
        return _ngrams(tokens, len(tokens), self.ngram_min, self.ngram_max)

    def _continuation(self, ngram: int, limit: int, length: int) -> tuple[int, ...]:
        """What followed `ngram`, at one of the places where the most did; may be empty."""
        places = [
            (self.reference, _ends(self._in_reference, ngram)),
            (self.tokens, _ends(self._in_text_before, ngram)),
            (self.tokens, _ends(self._in_text, ngram)),
        ]
        # The earlier a place, the longer its continuation.
        rooms = [len(tokens) - ends[0] for tokens, ends in places if ends]
        longest = min(limit, max(rooms, default=0))
        if longest == 0:
            return ()
        counts = [bisect_right(ends, len(tokens) - longest) for tokens, ends in places]
        index = self._draw(ngram, length) % sum(counts)
        for (tokens, ends), count in zip(places, counts, strict=True):
            if index < count:
                end = ends[index]
                return tuple(tokens[end : end + longest])
            index -= count
        raise AssertionError("no place has been drawn")

    def _draw(self, ngram: int, length: int) -> int:
        """64 random bits that depend on the seed and the text only."""
        data = struct.pack("<Q", length) + ngram.to_bytes(ngram.bit_length() // 8 + 1, "little")
        return int.from_bytes(blake2b(data, digest_size=8, key=self._key).digest(), "little")


@lru_cache(maxsize=1)
def _table(tokens: tuple[int, ...], ngram_min: int, ngram_max: int) -> _Table:
    """Of a whole text that never changes. One text after another has the same reference."""
    table: _Table = {}
    for end in range(1, len(tokens) + 1):
        for _, ngram in _ngrams(tokens, end, ngram_min, ngram_max):
            _add(table, ngram, end)
    return table


def _ngrams(
    tokens: Sequence[int], end: int, ngram_min: int, ngram_max: int
) -> list[tuple[int, int]]:
    found = []
    ngram = 1
    for ngram_len in range(1, min(ngram_max, end) + 1):
        ngram = ngram << 32 | tokens[end - ngram_len]
        if ngram_len >= ngram_min:
            found.append((ngram_len, ngram))
    return found


def _add(table: _Table, ngram: int, end: int) -> None:
    ends = table.get(ngram)
    if ends is None:
        table[ngram] = end
    elif isinstance(ends, int):
        table[ngram] = [ends, end]
    else:
        ends.append(end)


def _ends(table: _Table, ngram: int) -> Sequence[int]:
    ends = table.get(ngram, ())
    return (ends,) if isinstance(ends, int) else ends
