"""What the machine of any node is told, and what it asks for (pure)."""

from dataclasses import dataclass

from engine.slots import Move
from proto.messages import Message


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message came from the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """All messages that were there have been handled."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """A new text begins: the cache must hold `max_len` tokens."""

    max_len: int


@dataclass(frozen=True, slots=True)
class MoveRows:
    """Move cache rows, after every Compute that was asked for before."""

    move: Move


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Tick again at `deadline` (seconds) at the latest."""

    deadline: float


# What every machine may ask for, besides its own Compute.
SharedAction = Allocate | MoveRows | Send | WaitUntil
