"""Which connection speaks for which node (pure).

Theory of operation
-------------------
A node is known by its name. Each of its processes has a *life*, drawn at random, and opens several
connections: one that is answered, for its work, and one that only beats. A process opens them anew
where its link was cut, also while the old ones are not known to be dead: the newest counts.

The process that comes first has the name as long as its connection is open. Another one that says
the same name is turned away, and what it sends is not heard. Once the first has gone, its name is
free.

A connection of an older release says no life. It is heard like a process of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

NO_LIFE = ""
MAX_NAMES = 64  # more than nodes can take part; where there are no keys a peer may say any name


@dataclass(frozen=True, slots=True)
class Claim:
    """What a connection says of itself.

    life         of the process that has opened it
    is_answered  frames for the node go to it
    """

    name: bytes
    life: str
    is_answered: bool = True


@dataclass(frozen=True, slots=True)
class _Holder:
    life: str
    connection: bytes


class Names:
    """The names that are taken, by nodes that have introduced themselves.

    is_open  whether a connection is still there, as far as is known
    """

    def __init__(self, is_open: Callable[[bytes], bool]) -> None:
        self._is_open = is_open
        self._holders: dict[bytes, _Holder] = {}

    def introduce(self, connection: bytes, claim: Claim) -> bool:
        """The first word of a connection. False: another process has that name, or there are
        as many names as there may be.
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
        """Whether its process has the name that it says."""
        holder = self._holders.get(claim.name)
        return holder is not None and holder.life == claim.life

    def connection(self, name: bytes) -> bytes | None:
        """Where frames for this node go."""
        holder = self._holders.get(name)
        return None if holder is None else holder.connection
