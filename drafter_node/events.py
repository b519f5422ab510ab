"""What the drafter's machine is told, and what it asks for (pure)."""

from dataclasses import dataclass

from engine.slots import Feed
from node.events import Arrived, Confirmed, SharedAction, Tick
from proto.messages import Proposal, SamplingSpec


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


Event = Arrived | Confirmed | Tick | Proposed
Action = SharedAction | Compute
