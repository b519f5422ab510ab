"""What the drafter's machines are told, and what they ask for (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.slots import Feed
from node.events import Arrived, Confirmed, SharedAction
from proto.messages import Open, Proposal


@dataclass(frozen=True, slots=True)
class Part:
    """One text's part of a forward: run `feed`, and choose children at its last row, which predicts
    `position` (None: no choice).

    number      of the forward in this life of the text
    committed   the text so far, prompt included; as it is, not a copy
    sampled_in  classical rules: sample the child from the drafter's own distribution, with luck of
                this life (an incarnation) and this number; None: choose by the coupled noise
    drafted     tokens between the committed text and the choice, if logits processors look at them
    """

    opened: Open
    number: int
    committed: Sequence[int]
    feed: Feed
    position: int | None
    sampled_in: int | None = None
    drafted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a forward. Its parts are of different lanes; a chunk of a prefill comes alone."""

    ticket: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Children:
    """`tokens`, `scores`: the children chosen at the last row of a part, if asked for.

    proposals  under the classical rules: what each of them was sampled from
    """

    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    proposals: tuple[Proposal, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposed:
    """A forward is done; children for each of its parts."""

    ticket: int
    children: tuple[Children, ...]
    model_us: int


Event = Arrived | Confirmed
Action = SharedAction | Compute
