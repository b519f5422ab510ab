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

    def draft(
        self, action: drafter.Compute, digest: int, model_us: int, index: int
    ) -> drafter.Proposed:
        """What the drafter of this index proposes behind a path."""

    def verify(
        self, action: target.Compute, digests: Sequence[int], model_us: int
    ) -> target.Computed:
        """What the target says behind each path that was asked for."""


@dataclass(frozen=True, slots=True)
class Deterministic:
    """The target has one choice everywhere, so that every rule must write the same text."""

    model: ToyModel

    def draft(
        self, action: drafter.Compute, digest: int, model_us: int, index: int
    ) -> drafter.Proposed:
        """See `Models`."""
        if action.position is None:
            return drafter.Proposed(action.ticket, (), (), model_us)
        tokens, scores = self.model.propose(digest, index)
        certain: tuple[Proposal, ...] = ()
        if action.sampled_in is not None:
            certain = tuple(Proposal((token,), (1.0,)) for token in tokens)
        return drafter.Proposed(action.ticket, tokens, scores, model_us, certain)

    def verify(
        self, action: target.Compute, digests: Sequence[int], model_us: int
    ) -> target.Computed:
        """See `Models`."""
        choices = tuple(map(self.model.choose, digests))
        if action.judge is None:
            return target.Computed(action.ticket, choices, model_us)
        drafts = action.judge.drafts
        assert len(action.judge.proposals) == len(drafts)
        same = [draft == choice for draft, choice in zip(drafts, choices, strict=False)]
        accepted = same.index(False) if False in same else len(drafts)
        return target.Computed(action.ticket, choices[: accepted + 1], model_us, accepted)
