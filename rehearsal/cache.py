"""A KV cache in virtual time, which raises an error at every mistake of the state machines.

A path is hashed into a digest, token by token. The cache keeps a token, a position and a digest for
each slot, as a real one keeps keys and values that were computed from everything that the row saw.
A row that sees a hole, a stale row, a wrong position or a row that was computed on another path
raises `CacheError`. The tokens that the model chooses depend on what the row sees, so a mistake
that passes these checks changes the text.

The cache of a head also knows which feature each of its rows was given. A feature is the digest of
the path whose last token it belongs to, so a wrong one is noticed at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from engine.layout.slots import Feed, Move
from rehearsal.timeline import BITS_64


class CacheError(AssertionError):
    """A forward pass or a move that would leave a real cache with wrong contents."""


def fold(digest: int, token: int) -> int:
    """Return the digest of a path that is continued by one token."""
    return (digest * 6364136223846793005 + token + 1) & BITS_64


@dataclass(frozen=True, slots=True)
class CachedRow:
    """The contents of one slot.

    `digest` is of the path that the row saw, its own token included.
    """

    token: int
    position: int
    digest: int


class VirtualCache:
    """The slots of one lane; performs passes and moves in order, and checks every row."""

    def __init__(self, capacity: int) -> None:
        self.rows: list[CachedRow | None] = [None] * capacity
        self._sound_len = 0  # slots [0, _sound_len) are known to hold one text in order

    def run(self, feed: Feed) -> list[int]:
        """Write the rows of a pass; returns for each row the digest of the path that it saw."""
        if not len(feed.tokens) == len(feed.positions) == len(feed.slots) > 0:
            raise CacheError(
                "a pass needs as many positions and slots as tokens, and a row at least"
            )
        if len(set(feed.slots)) < len(feed.slots):
            raise CacheError("two rows of a pass in one slot")
        return self._run_causal(feed) if feed.masks is None else self._run_masked(feed, feed.masks)

    def move(self, move: Move) -> None:
        """Copy rows; all are read before any is written."""
        if len(set(move.targets)) < len(move.targets):
            raise CacheError("two rows moved to one slot")
        rows = [self.rows[source] for source in move.sources]
        for target, row in zip(move.targets, rows, strict=True):
            self._write(target, row)

    def copy(self, other: "VirtualCache", length: int) -> None:
        """Copy the first `length` rows of another lane, whose text begins alike."""
        if self is other:
            raise CacheError("a lane is copied to itself")
        self.rows[:length] = other.rows[:length]
        self._sound_len = 0
        self._prefix_digest(length)

    def wipe(self, start: int) -> None:
        """Forget all rows from slot `start` on."""
        self.rows[start:] = [None] * (len(self.rows) - start)
        self._sound_len = min(self._sound_len, start)

    def _run_causal(self, feed: Feed) -> list[int]:
        if feed.slots != feed.positions:
            raise CacheError("in a prefill the slots are the positions")
        digest, digests = self._prefix_digest(feed.slots[0]), []
        for index, (token, slot) in enumerate(zip(feed.tokens, feed.slots, strict=True)):
            if slot != feed.slots[0] + index:
                raise CacheError("a prefill has a gap")
            self._check_before(feed.before[index], digest)
            digest = fold(digest, token)
            digests.append(digest)
            self._write(slot, CachedRow(token, slot, digest))
        return digests

    def _run_masked(self, feed: Feed, masks: Sequence[int]) -> list[int]:
        prefix = self._prefix_digest(feed.prefix_len)
        digests = []
        for token, position, slot, mask, before in zip(
            feed.tokens, feed.positions, feed.slots, masks, feed.before, strict=True
        ):
            if slot < feed.prefix_len:
                raise CacheError(f"slot {slot} of the prefix is written by a tree row")
            own = slot - feed.prefix_len
            if not mask >> own & 1:
                raise CacheError("a row does not see itself")
            above = self._seen(feed.prefix_len, mask & ~(1 << own))
            digest = self._path_digest(prefix, feed.prefix_len, above)
            if position != feed.prefix_len + len(above):
                raise CacheError(
                    f"position {position} below {feed.prefix_len} + {len(above)} tokens"
                )
            self._check_before(before, digest)
            digests.append(fold(digest, token))
            self._write(slot, CachedRow(token, position, digests[-1]))
        return digests

    def _check_before(self, before: int, digest: int) -> None:
        """Raise CacheError unless slot `before` holds the last token of this digest's path."""
        row = self.rows[before] if before >= 0 else None
        if (0 if row is None else row.digest) != digest:
            raise CacheError(f"slot {before} is not that of the token before")

    def _seen(self, prefix_len: int, mask: int) -> list[CachedRow]:
        """Return the rows behind the prefix that a mask shows, by position."""
        rows = []
        while mask:
            index = (mask & -mask).bit_length() - 1
            mask &= mask - 1
            row = self.rows[prefix_len + index]
            if row is None:
                raise CacheError(f"slot {prefix_len + index} is seen before it is written")
            rows.append(row)
        return sorted(rows, key=lambda row: row.position)

    @staticmethod
    def _path_digest(digest: int, start: int, rows: Sequence[CachedRow]) -> int:
        for position, row in enumerate(rows, start):
            digest = fold(digest, row.token)
            if row.position != position:
                raise CacheError(f"a row of position {row.position} is seen at {position}")
            if row.digest != digest:
                raise CacheError(f"the row at position {position} was computed on another path")
        return digest

    def _prefix_digest(self, length: int) -> int:
        """Return the digest of slots [0, length), which must hold one text in order."""
        start = min(self._sound_len, length)
        rows = self.rows[start:length]
        if None in rows:
            raise CacheError(
                f"the prefix of {length} tokens has a hole at {start + rows.index(None)}"
            )
        before = self.rows[start - 1] if start else None
        digest = before.digest if before is not None else 0
        digest = self._path_digest(digest, start, [row for row in rows if row is not None])
        self._sound_len = max(self._sound_len, length)
        return digest

    def _write(self, slot: int, row: CachedRow | None) -> None:
        self.rows[slot] = row
        self._sound_len = min(self._sound_len, slot)


# -- the cache of a head ---------------------------------------------------------------------------


class Given(Enum):
    """What a row of a head's cache was given about the token before it."""

    NOTHING = auto()
    FEATURE = auto()  # the target's feature
    GUESS = auto()  # the head's own prediction


FEATURE_BYTES = {"digest": 8}  # of one token, by the name of the number type


def feature_of(digest: int) -> bytes:
    """Return the feature (8 bytes) of the last token of the path with this digest."""
    return digest.to_bytes(8, "little")


class HeadCache(VirtualCache):
    """The cache of a head: also knows what each row was given about the token before it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._given = [Given.NOTHING] * capacity

    def run(self, feed: Feed) -> list[int]:
        """Write a pass's rows; return each row's digest. Raises CacheError for a wrong feature."""
        digests = super().run(feed)
        if Given.GUESS in self._given[: feed.prefix_len]:
            raise CacheError("a committed token is still as the head had guessed it")
        for slot, before, feature in zip(feed.slots, feed.before, _features(feed), strict=True):
            self._given[slot] = self._taken(before, feature)
        return digests

    def _taken(self, before: int, feature: bytes | None) -> Given:
        row = self.rows[before] if before >= 0 else None
        if feature is None:
            return Given.NOTHING
        if feature and feature != feature_of(0 if row is None else row.digest):
            raise CacheError("a feature of another row")
        if feature:
            return Given.FEATURE
        if before < 0 or self._given[before] is Given.NOTHING:
            raise CacheError("a draft behind a token of which nothing is known")
        return Given.GUESS

    def move(self, move: Move) -> None:
        """Copy rows, and with each what it was given; all are read before any is written."""
        super().move(move)
        given = [self._given[source] for source in move.sources]
        for target, one in zip(move.targets, given, strict=True):
            self._given[target] = one

    def copy(self, other: VirtualCache, length: int) -> None:
        """Copy the first `length` rows of another lane, and what each was given."""
        assert isinstance(other, HeadCache)
        super().copy(other, length)
        self._given[:length] = other._given[:length]


def _features(feed: Feed) -> Sequence[bytes | None]:
    return feed.features or (b"",) * len(feed.tokens)
