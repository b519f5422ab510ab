"""What the nodes of the simulator compute with, where the target has one choice everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass

from drafter_node import compute as drafter
from proto.messages import Proposal
from target_node import compute as target
from tests.simulation.toys import ToyModel


@dataclass(frozen=True, slots=True)
class Deterministic:
    """The target has one choice everywhere, so that every rule must write the same text."""

    model: ToyModel

    def draft(
        self, part: drafter.Part, digests: Sequence[int], index: int
    ) -> tuple[drafter.Children, ...]:
        """See `rehearsal.world.Models`."""
        is_coupled = part.sampled_in is None
        children = []
        for digest in digests:
            tokens, scores = self.model.propose(digest, index)
            certain = () if is_coupled else tuple(Proposal((token,), (1.0,)) for token in tokens)
            children.append(drafter.Children(tokens, scores, certain))
        return tuple(children)

    def verify(self, part: target.Part, digests: Sequence[int]) -> target.Outcome:
        """See `rehearsal.world.Models`."""
        choices = tuple(map(self.model.choose, digests))
        if part.judge is None:
            return target.Outcome(choices)
        drafts = part.judge.drafts
        assert len(part.judge.proposals) == len(drafts)
        same = [draft == choice for draft, choice in zip(drafts, choices, strict=False)]
        accepted = same.index(False) if False in same else len(drafts)
        return target.Outcome(choices[: accepted + 1], accepted)
