"""What the machines of the drafter ask of its model, a Compute, and what it says (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from engine.layout.slots import Feed
from node.follower import SharedAction
from proto.messages import Open, Proposal


@dataclass(frozen=True, slots=True)
class Part:
    """One text's part of a forward: run `feed`, and choose children at its last `num_asked` rows.

    number      of the forward in this life of the text
    committed   the text so far, prompt included; as it is, not a copy
    sampled_in  classical rules: sample the child from the drafter's own distribution, with luck of
                this life (an incarnation) and this number; None: choose by the coupled noise
    drafted     per row that is asked, the tokens between the committed text and the choice, if
                logits processors look at them
    ahead       of a chain: the feeds of steps that may follow at once, each of the token that is
                chosen before it, unless a message comes
    least       they end where the chosen scores add up to less
    feature_dtype  of a head: of the features that the feed carries
    """

    opened: Open
    number: int
    committed: Sequence[int]
    feed: Feed
    num_asked: int
    sampled_in: int | None = None
    drafted: tuple[tuple[int, ...], ...] = ()
    ahead: tuple[Feed, ...] = ()
    least: float = 0.0
    feature_dtype: str = ""

    def after(self, chosen: "Sequence[Children]") -> Self | None:
        """The step that follows these at once; None: none does.

        chosen  what this step has chosen, and what each of those after it has
        """
        if len(chosen) > len(self.ahead) or not chosen[-1].tokens:
            return None
        token = chosen[-1].tokens[0]
        if token in self.opened.limits.stop_ids or sum(c.scores[0] for c in chosen) < self.least:
            return None
        number, feed = self.number + len(chosen), self.ahead[len(chosen) - 1]
        feed = replace(feed, tokens=(token,))
        return replace(self, number=number, feed=feed, num_asked=1)

    @property
    def positions(self) -> tuple[int, ...]:
        """What the rows that are asked predict."""
        first = len(self.feed.positions) - self.num_asked
        return tuple(position + 1 for position in self.feed.positions[first:])


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a forward. Its parts are of different lanes; a chunk of a prefill comes alone."""

    ticket: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Children:
    """`tokens`, `scores`: the children chosen at one row, the likeliest first; none if the logits
    are not finite.

    proposals  under the classical rules: what each of them was sampled from
    """

    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    proposals: tuple[Proposal, ...] = ()


NOTHING = Children((), ())


@dataclass(frozen=True, slots=True)
class Proposed:
    """A forward is done; for each of its parts, children at every row that was asked.

    Of a part with steps ahead: of its only row, and then of each of those steps that were made.

    num_steps  forwards that were made
    model_us   that they took, together
    has_failed  memory was missing: nothing was computed, and there are no children
    """

    ticket: int
    children: tuple[tuple[Children, ...], ...]
    model_us: int
    num_steps: int = 1
    has_failed: bool = False


Action = SharedAction | Compute
