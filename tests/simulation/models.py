"""What the nodes of the simulator compute with: the place of the engine in a node's loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from drafter_node import events as drafter
from proto.messages import Proposal
from target_node import events as target
from tests.simulation.toys import ToyModel


class Models(Protocol):
    """A target and a drafter. A digest names the path that a row saw."""

    def draft(self, part: drafter.Part, digest: int, index: int) -> drafter.Children:
        """What the drafter of this index proposes behind a path."""

    def verify(self, part: target.Part, digests: Sequence[int]) -> target.Outcome:
        """What the target says behind each path that was asked for."""


@dataclass(frozen=True, slots=True)
class Deterministic:
    """The target has one choice everywhere, so that every rule must write the same text."""

    model: ToyModel

    def draft(self, part: drafter.Part, digest: int, index: int) -> drafter.Children:
        """See `Models`."""
        if part.position is None:
            return drafter.Children((), ())
        tokens, scores = self.model.propose(digest, index)
        certain: tuple[Proposal, ...] = ()
        if part.sampled_in is not None:
            certain = tuple(Proposal((token,), (1.0,)) for token in tokens)
        return drafter.Children(tokens, scores, certain)

    def verify(self, part: target.Part, digests: Sequence[int]) -> target.Outcome:
        """See `Models`."""
        choices = tuple(map(self.model.choose, digests))
        if part.judge is None:
            return target.Outcome(choices)
        drafts = part.judge.drafts
        assert len(part.judge.proposals) == len(drafts)
        same = [draft == choice for draft, choice in zip(drafts, choices, strict=False)]
        accepted = same.index(False) if False in same else len(drafts)
        return target.Outcome(choices[: accepted + 1], accepted)
