"""What the drafter's machine is told, and what it asks for (pure)."""

from dataclasses import dataclass

from engine.slots import Feed, Move
from proto.messages import Message, SamplingSpec


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message came from the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class Proposed:
    """A forward is done. `tokens`, `scores`: the children chosen at its last row, if asked for."""

    ticket: int
    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    model_us: int


@dataclass(frozen=True, slots=True)
class Tick:
    """All messages that were there have been handled."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """A new text begins: the cache must hold `max_len` tokens."""

    max_len: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `feed`; choose children at its last row, which predicts `position` (None: no choice)."""

    ticket: int
    feed: Feed
    position: int | None
    sampling: SamplingSpec


@dataclass(frozen=True, slots=True)
class MoveRows:
    """Move cache rows, after every Compute that was asked for before."""

    move: Move


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the coordinator."""

    message: Message


Event = Arrived | Proposed | Tick
Action = Allocate | Compute | MoveRows | Send
