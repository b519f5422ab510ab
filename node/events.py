"""What the machine of any node is told, and what it asks for (pure)."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.layout.slots import Move
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
    """A new text begins, in the only lane: the cache must hold `max_len` tokens."""

    max_len: int


@dataclass(frozen=True, slots=True)
class MoveRows:
    """Move cache rows, after every Compute that was asked for before; one move of a lane."""

    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class CopyPrefix:
    """Copy the first `length` slots of a lane to another, likewise."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Wipe:
    """Write zeros to all slots of a lane from `start` on, likewise: some hold NaN or infinity."""

    lane: int
    start: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Tick again at `deadline` (seconds) at the latest."""

    deadline: float


# What every machine may ask for, besides its own Compute.
SharedAction = Allocate | CopyPrefix | MoveRows | Send | WaitUntil | Wipe


def moved_together(actions: Iterable[SharedAction]) -> list[SharedAction]:
    """The same, with all moves as one that comes last: nobody waits for it as for a verdict."""
    moves: list[Move] = []
    others: list[SharedAction] = []
    for action in actions:
        if isinstance(action, MoveRows):
            moves += action.moves
        else:
            others.append(action)
    return [*others, MoveRows(tuple(moves))] if moves else others


def gap(session: int, incarnation: int, length: int) -> Send:
    """Ask to be told the text anew, by an Open.

    incarnation, length  of the text that is here; zeros if there is none
    """
    detail = f"the text here has {length} tokens and is another"
    return Send(Fault(session, incarnation, FaultCode.GAP, detail))
