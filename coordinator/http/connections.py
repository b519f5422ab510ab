"""Which connections of clients are open, and which is closed to make room for others (pure).

Theory of operation
-------------------
Whoever reaches the address can open connections, also without the API key. So none may keep others
out before one of its requests was let in: while more than `most` are open, those are closed that
have no request in work. First goes the oldest of those that have not sent a whole header within
PATIENCE_S seconds. Else it is the one in which nothing has happened for the longest, where the end
of a header and the end of an answer count. A connection that was just opened is thus the last to be
closed, whatever the others have done.

A connection is held while a request of it is in work (`work.py` bounds these), and then it is never
closed for others.
"""

from enum import Enum, auto
from typing import Generic, TypeVar

Key = TypeVar("Key")

PATIENCE_S = 1.0


class Stage(Enum):
    """How far a connection has come with its latest request."""

    SILENT = auto()  # it has never sent a whole header
    COMING = auto()  # a whole header has come; the request is being read, refused, or answered
    IDLE = auto()  # the request was answered, and no other header has come since


class Connections(Generic[Key]):
    """The open connections of a server, each under a key that the caller chooses.

    most  connections that may stay open

    Times are monotonic seconds.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._stages: dict[Key, Stage] = {}  # of all open connections
        self._held: set[Key] = set()  # a part of `_stages`
        # Those that are not held, with the time of their latest event; the oldest comes first.
        self._loose: dict[Key, float] = {}
        self._silent: dict[Key, float] = {}  # the part of `_loose` that is SILENT, in its order

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def is_crowded(self) -> bool:
        """True if there is no room for one more connection."""
        return len(self) >= self.most

    def enter(self, key: Key, stage: Stage, now: float) -> None:
        """Note that a connection was opened, or has come to another stage."""
        if self._stages.get(key) is stage:
            return
        self._stages[key] = stage
        if key not in self._held:
            self._let_loose(key, now)

    def hold(self, key: Key) -> None:
        """Never close this connection for others until `release`; nothing if it has left."""
        if key in self._stages:
            self._drop(key)
            self._held.add(key)

    def release(self, key: Key, now: float) -> None:
        """Undo `hold`; nothing if the connection has left."""
        if key in self._held:
            self._held.remove(key)
            self._let_loose(key, now)

    def leave(self, key: Key) -> None:
        """Note that a connection is closed, or about to be. May be called twice."""
        self._drop(key)
        self._stages.pop(key, None)
        self._held.discard(key)

    def first(self, now: float) -> Key | None:
        """Return the connection that is to be closed first; None: all are held, if any."""
        for key, since in self._silent.items():
            if now - since >= PATIENCE_S:
                return key
            break
        return next(iter(self._loose), None)

    def surplus(self, now: float) -> Key | None:
        """Return the connection to close now, because more than `most` are open; else None."""
        return self.first(now) if len(self) > self.most else None

    def _let_loose(self, key: Key, now: float) -> None:
        self._drop(key)
        self._loose[key] = now
        if self._stages[key] is Stage.SILENT:
            self._silent[key] = now

    def _drop(self, key: Key) -> None:
        self._loose.pop(key, None)
        self._silent.pop(key, None)

    def check(self) -> None:
        """Assert every invariant (for tests)."""
        assert not self._held & self._loose.keys()
        assert self._held | self._loose.keys() == self._stages.keys()
        assert list(self._loose.values()) == sorted(self._loose.values())
        silent = [key for key in self._loose if self._stages[key] is Stage.SILENT]
        assert list(self._silent) == silent
