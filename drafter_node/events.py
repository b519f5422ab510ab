"""What the drafter's machine is told, and what it asks for (pure)."""

from dataclasses import dataclass

from engine.slots import Feed, Move
from proto.messages import Message, Proposal, SamplingSpec


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message came from the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class Proposed:
    """A forward is done. `tokens`, `scores`: the children chosen at its last row, if asked for.

    proposals  under the classical rules: what each of them was sampled from
    """

    ticket: int
    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    model_us: int
    proposals: tuple[Proposal, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """All messages that were there have been handled."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """A new text begins: the cache must hold `max_len` tokens."""

    max_len: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `feed`; choose children at its last row, which predicts `position` (None: no choice).

    sampled_in  classical rules: sample the child from the drafter's own distribution, with luck of
                this life (an incarnation) and this ticket; None: choose by the coupled noise
    drafted     tokens between the committed text and the choice, if logits processors look at them
    """

    ticket: int
    feed: Feed
    position: int | None
    sampling: SamplingSpec
    sampled_in: int | None = None
    drafted: tuple[int, ...] = ()


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


Event = Arrived | Proposed | Tick
Action = Allocate | Compute | MoveRows | Send | WaitUntil
