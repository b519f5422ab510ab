"""The place of a head's cache in virtual time: what each of its rows was given.

A feature is the digest of the path whose last token it belongs to, so a wrong one is seen at once.
"""

from collections.abc import Sequence
from enum import Enum, auto

from engine.slots import Feed, Move
from rehearsal.cache import CacheError, VirtualCache


class Given(Enum):
    """What a row knows of the token before it."""

    NOTHING = auto()
    FEATURE = auto()  # the target's
    GUESS = auto()  # the head's own


def feature_of(digest: int) -> bytes:
    """The feature where the last token of the path of this digest was read."""
    return digest.to_bytes(8, "little")


class HeadCache(VirtualCache):
    """A cache whose rows have features."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._given = [Given.NOTHING] * capacity

    def run(self, feed: Feed) -> list[int]:
        """See `VirtualCache.run`."""
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
        """See `VirtualCache.move`."""
        super().move(move)
        given = [self._given[source] for source in move.sources]
        for target, one in zip(move.targets, given, strict=True):
            self._given[target] = one

    def copy(self, other: VirtualCache, length: int) -> None:
        """See `VirtualCache.copy`."""
        assert isinstance(other, HeadCache)
        super().copy(other, length)
        self._given[:length] = other._given[:length]


def _features(feed: Feed) -> Sequence[bytes | None]:
    return feed.features or (b"",) * len(feed.tokens)
