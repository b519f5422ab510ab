"""Events tell a node's machines facts; actions are what they ask the loop to do (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.layout.slots import Move
from proto.messages import (
    Fault,
    FaultCode,
    Message,
)


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
    """All messages that had arrived have been handled; a forward may be launched now."""


@dataclass(frozen=True, slots=True)
class Afterwards:
    """The result of a forward was handled; beside a device the next one is launched by now.

    Now follows the work for which no device waits: sending messages, and learning from the result.
    """


@dataclass(frozen=True, slots=True)
class Allocate:
    """A new text begins in the only lane: the cache must have room for `max_len` tokens."""

    max_len: int


@dataclass(frozen=True, slots=True)
class MoveRows:
    """Move cache rows, after every Compute that was asked for before.

    One move at most for a lane.
    """

    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class CopyPrefix:
    """Copy the first `length` slots of lane `source` to `target`, after every earlier Compute."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Wipe:
    """Zero the slots of a lane from `start` on, which hold NaN, after every earlier Compute."""

    lane: int
    start: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class Remember:
    """Keep what was found out about texts for later starts; it replaces what was kept before."""

    outcomes: Sequence[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Tick again at `deadline` (seconds) at the latest."""

    deadline: float


TextEvent = Arrived | Confirmed  # the events that the machine of a text gets
# The actions that every machine may ask for, besides its own Compute.
SharedAction = Allocate | CopyPrefix | MoveRows | Remember | Send | WaitUntil | Wipe


def gap(session: int, incarnation: int, length: int) -> Send:
    """Return a message to the coordinator that asks for an Open of the text.

    incarnation, length  of the text that is here; zeros if there is none
    """
    detail = f"the text here has {length} tokens and is another"
    return Send(Fault(session, incarnation, FaultCode.GAP, detail))
