"""What the machine of any node is told, and what it asks for (pure)."""

from dataclasses import dataclass

from engine.slots import Move
from proto.messages import Fault, FaultCode, Message


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message came from the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A heartbeat shows that the coordinator has the first `length` tokens of our text."""

    length: int


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


def gap(session: int, incarnation: int, length: int) -> Send:
    """Ask to be told the text anew, by an Open.

    incarnation, length  of the text that is here; zeros if there is none
    """
    detail = f"the text here has {length} tokens and is another"
    return Send(Fault(session, incarnation, FaultCode.GAP, detail))
