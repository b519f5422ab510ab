"""Drafts without a model: copy what followed the last few tokens earlier in the text (pure).

Theory of operation
-------------------
The last n tokens are looked up in the text so far, and the tokens that followed them there are the
draft: prompt lookup (Saxena 2023). A reference text to copy from can be given too (LLMA, Yang et
al., arXiv 2304.04487).

    which n      the largest, from `ngram_max` down to `ngram_min`, whose n-gram occurs before and
                 has at least one token after it
    which place  the one with the longest continuation, where anything beyond the wanted length
                 does not count; among equals one is drawn by a hash of the seed, the n-gram and the
                 text's length, so that a text has the same draft in every process and after every
                 restart

A table maps an n-gram to the places where it ends, ascending. A lookup costs at most `ngram_max`
probes with a bisection each, and a new token costs `ngram_max` insertions, however long the text
is. An n-gram is stored as one exact integer: a leading 1 bit, then 32 bits for each token. The
reference has its own table and its own tokens, so no n-gram and no continuation runs from it into
the text.

Memory is bounded: the text is indexed in blocks, and only the last two blocks are searched. A block
begins at a multiple of its length, so what is forgotten depends on the text alone.
"""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

BLOCK_LEN = 1 << 16

_BITS_64 = (1 << 64) - 1
# n-gram -> where it ends: the number of tokens up to its end. Most n-grams occur once; an int
# instead of a list of one takes a third of the memory and costs the garbage collector nothing.
_Table = dict[int, int | list[int]]


@dataclass(frozen=True, slots=True)
class Match:
    """A draft: tokens (at least one) that followed the last `ngram_len` tokens elsewhere."""

    tokens: tuple[int, ...]
    ngram_len: int


class NgramIndex:
    """Index of the n-grams of one growing text and of a reference text, to draft by copying."""

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
        self._in_text_before: _Table = {}  # n-grams that end in the block before that one

    def __len__(self) -> int:
        """Return the number of tokens of the text (the reference not counted)."""
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text and index the n-grams that they end."""
        for token in tokens:
            if len(self.tokens) % BLOCK_LEN == 0:
                self._in_text_before, self._in_text = self._in_text, {}
            self.tokens.append(token)
            for _, ngram in self._ngrams(self.tokens):
                _add(self._in_text, ngram, len(self.tokens))

    def find(self, limit: int, path: Sequence[int] = ()) -> Match | None:
        """Return at most `limit` draft tokens to follow the text plus `path`, or None.

        path  tokens after the text that are not committed; they are not indexed

        Returns None if no n-gram at the end of text and path occurs earlier with a token after it.
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
        """Return (length, value) of each n-gram at the end of `tokens`, the shortest first."""
        return _ngrams(tokens, len(tokens), self.ngram_min, self.ngram_max)

    def _continuation(self, ngram: int, limit: int, length: int) -> tuple[int, ...]:
        """Return at most `limit` tokens that followed `ngram` at one place; empty if none did.

        Of the places with the longest continuation one is drawn by `_draw`.
        """
        places = [
            (self.reference, _ends(self._in_reference, ngram)),
            (self.tokens, _ends(self._in_text_before, ngram)),
            (self.tokens, _ends(self._in_text, ngram)),
        ]
        # An earlier place has a longer continuation, so the first of each table is the longest.
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
        """Return a 64-bit hash of seed, n-gram and text length, used as a random number."""
        data = struct.pack("<Q", length) + ngram.to_bytes(ngram.bit_length() // 8 + 1, "little")
        return int.from_bytes(blake2b(data, digest_size=8, key=self._key).digest(), "little")


@lru_cache(maxsize=1)
def _table(tokens: tuple[int, ...], ngram_min: int, ngram_max: int) -> _Table:
    """Return the n-gram table of a fixed text; the last one is cached, as texts share it."""
    table: _Table = {}
    for end in range(1, len(tokens) + 1):
        for _, ngram in _ngrams(tokens, end, ngram_min, ngram_max):
            _add(table, ngram, end)
    return table


def _ngrams(
    tokens: Sequence[int], end: int, ngram_min: int, ngram_max: int
) -> list[tuple[int, int]]:
    """Return (length, value) of each n-gram that ends before index `end`, the shortest first."""
    found = []
    ngram = 1
    for ngram_len in range(1, min(ngram_max, end) + 1):
        ngram = ngram << 32 | tokens[end - ngram_len]
        if ngram_len >= ngram_min:
            found.append((ngram_len, ngram))
    return found


def _add(table: _Table, ngram: int, end: int) -> None:
    """Record in the table that `ngram` ends at `end`."""
    ends = table.get(ngram)
    if ends is None:
        table[ngram] = end
    elif isinstance(ends, int):
        table[ngram] = [ends, end]
    else:
        ends.append(end)


def _ends(table: _Table, ngram: int) -> Sequence[int]:
    """Return the places where `ngram` ends, ascending; empty if it is not in the table."""
    ends = table.get(ngram, ())
    return (ends,) if isinstance(ends, int) else ends
