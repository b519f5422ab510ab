"""Decides which connection belongs to which node (pure).

Theory of operation
-------------------
A node is known by its name. Each process that runs as this node has a *life*, a random word, and
opens several connections: one for its work, over which it is answered, and one that only sends
heartbeats. If its link was cut, a process opens new connections, perhaps before the old ones are
known to be dead: the newest counts.

The process that connects first holds the name as long as its connection is open. Another process
that gives the same name is turned away, and its messages are ignored. Once the first has gone, its
name is free.

A connection of an older release states no life. All connections of a name without a life are taken
for one process.
"""

from collections.abc import Callable
from dataclasses import dataclass

NO_LIFE = ""
MAX_NAMES = 64  # more than there can be nodes; without keys a peer may give any name


@dataclass(frozen=True, slots=True)
class Claim:
    """What a connection states about itself.

    name         of the node
    life         of the process that has opened the connection
    is_answered  True: frames for the node are sent over this connection
    """

    name: bytes
    life: str
    is_answered: bool = True


@dataclass(frozen=True, slots=True)
class _Holder:
    life: str
    connection: bytes


class Names:
    """The names that connected nodes hold, and the connection over which each node is answered.

    is_open  tells whether a connection is still open, as far as is known
    """

    def __init__(self, is_open: Callable[[bytes], bool]) -> None:
        self._is_open = is_open
        self._holders: dict[bytes, _Holder] = {}

    def introduce(self, connection: bytes, claim: Claim) -> bool:
        """Register a new connection; False if another process holds its name.

        Also False if the name is new and MAX_NAMES names are held by open connections.
        """
        holder = self._holders.get(claim.name)
        is_taken = holder is not None and holder.life != claim.life
        if holder is not None and is_taken and self._is_open(holder.connection):
            return False
        if holder is None and len(self._holders) >= MAX_NAMES:
            self._holders = {
                k: one for k, one in self._holders.items() if self._is_open(one.connection)
            }
            if len(self._holders) >= MAX_NAMES:
                return False
        if claim.is_answered:
            self._holders[claim.name] = _Holder(claim.life, connection)
        return True

    def has(self, claim: Claim) -> bool:
        """True if the claim's process holds the name that it claims."""
        holder = self._holders.get(claim.name)
        return holder is not None and holder.life == claim.life

    def connection(self, name: bytes) -> bytes | None:
        """Return the connection over which this node gets its frames; None if it has none."""
        holder = self._holders.get(name)
        return None if holder is None else holder.connection
