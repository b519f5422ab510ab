"""Which connections of clients are open, and which is closed to make room for others (pure).

Theory of operation
-------------------
Whoever reaches the address can open connections, also without the API key. So none may keep others
out before one of its requests was let in: while more than `most` are open, those are closed that
have no request in work. They are closed in this order, and among equals the one first that has been
in its stage for the longest:

    SILENT  it has never sent a whole header
    IDLE    its last request was answered, and no other has come since
    COMING  a whole header has come; the request is being read, refused, or answered to anybody

A connection is held while a request of it is in work (`work.py` bounds these), and then it is never
closed for others.
"""

from enum import IntEnum
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Stage(IntEnum):
    """How far a connection that is not held has come; the lowest is closed first."""

    SILENT = 0
    IDLE = 1
    COMING = 2


class Connections(Generic[Key]):
    """The open connections of a server, each under a key that the caller chooses.

    most  connections that may stay open
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # Those that are not held, by their stage; in the order in which they entered it.
        self._loose: dict[Stage, dict[Key, None]] = {stage: {} for stage in Stage}
        self._stages: dict[Key, Stage] = {}  # of all open connections, held ones too
        self._held: set[Key] = set()  # a part of `_stages`; none is in `_loose`

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def is_crowded(self) -> bool:
        """True if there is no room for one more connection."""
        return len(self) >= self.most

    def enter(self, key: Key, stage: Stage) -> None:
        """Note that a connection was opened, or has come to another stage."""
        if self._stages.get(key) is stage:
            return
        self._drop(key)
        self._stages[key] = stage
        if key not in self._held:
            self._loose[stage][key] = None

    def hold(self, key: Key) -> None:
        """Never close this connection for others until `release`; nothing if it has left."""
        if key in self._stages:
            self._drop(key)
            self._held.add(key)

    def release(self, key: Key) -> None:
        """Undo `hold`; nothing if the connection has left."""
        if key in self._held:
            self._held.remove(key)
            self._loose[self._stages[key]][key] = None

    def leave(self, key: Key) -> None:
        """Note that a connection is closed, or about to be. May be called twice."""
        self._drop(key)
        self._stages.pop(key, None)
        self._held.discard(key)

    def first(self) -> Key | None:
        """Return the connection that is to be closed first; None: all are held, if any."""
        return next((key for loose in self._loose.values() for key in loose), None)

    def surplus(self) -> Key | None:
        """Return the connection to close now, because more than `most` are open; else None."""
        return self.first() if len(self) > self.most else None

    def _drop(self, key: Key) -> None:
        if key in self._stages and key not in self._held:
            del self._loose[self._stages[key]][key]

    def check(self) -> None:
        """Assert every invariant (for tests)."""
        loose = [key for keys in self._loose.values() for key in keys]
        assert len(loose) == len(set(loose))
        assert not self._held.intersection(loose)
        assert self._held.union(loose) == set(self._stages)
        assert all(self._stages[key] is stage for stage in Stage for key in self._loose[stage])
