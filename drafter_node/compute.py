"""What the drafter's state machine asks of its model (Compute), and the answer (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from engine.layout.slots import Feed
from node.events import SharedAction
from proto.messages import Open, Proposal


@dataclass(frozen=True, slots=True)
class ChoicePoint:
    """Where the target is when it chooses the token that a drafter's token belongs to.

    position  the position of the token that the bytes in `begun` would be, or begin
    begun     the last of the target's tokens on the drafter's path, in bytes; b"": there is none,
              the next token begins at `position`
    rest      bytes that are known to follow the path: only tokens that begin with them fit
    """

    position: int
    begun: bytes
    rest: bytes = b""


@dataclass(frozen=True, slots=True)
class Part:
    """One text's part of a forward: run `feed`, and choose children at its last `num_asked` rows.

    number      number of the forward in this life of the text (a life lasts from one Open to the
                next)
    committed   the text so far, prompt included; the list itself, not a copy
    sampled_in  classical rules: sample the child from the drafter's own distribution, with noise
                made from this incarnation and `number`; None: choose with the noise shared with the
                target
    drafted     for each row that is asked, the tokens between the committed text and the choice, if
                logits processors or a translation need them
    ahead       of a chain: the feeds of further steps that may follow at once, each for the token
                that is chosen by the step before, unless a message arrives
    least       the further steps end when the sum of the chosen scores is less than this
    feature_dtype  of a head: type of the features (target's hidden states) that the feed carries
    places      of a drafter with another vocabulary: for each asked row, where the target is
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
    places: tuple[ChoicePoint, ...] = ()

    def is_followed(self, chosen: "Sequence[Children]") -> bool:
        """True if one of the further steps (`ahead`) is to be made next.

        chosen  the children that this step has chosen, and those of each further step so far
        """
        if len(chosen) > len(self.ahead) or not chosen[-1].tokens:
            return False
        if chosen[-1].tokens[0] in self.opened.limits.stop_ids:
            return False
        return sum([one.scores[0] for one in chosen]) >= self.least

    def of_row(self, row: int) -> Self:
        """Return what says of one asked row, numbered from 0, how its children are chosen."""
        where = len(self.feed.positions) - self.num_asked + row
        feed = replace(self.feed, positions=self.feed.positions[where : where + 1])
        drafted, places = self.drafted[row : row + 1], self.places[row : row + 1]
        return replace(self, feed=feed, num_asked=1, drafted=drafted, places=places)

    def after(self, chosen: "Sequence[Children]") -> Self:
        """Return the next of the further steps; `chosen` as in `is_followed`, which is True."""
        feed = replace(self.ahead[len(chosen) - 1], tokens=chosen[-1].tokens[:1])
        return replace(self, number=self.number + len(chosen), feed=feed, num_asked=1)

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the position of the token that each asked row predicts."""
        first = len(self.feed.positions) - self.num_asked
        return tuple(position + 1 for position in self.feed.positions[first:])


@dataclass(frozen=True, slots=True)
class Compute:
    """Run one forward. Its parts are of different lanes; a chunk of a prefill comes alone."""

    ticket: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Children:
    """The child tokens that were chosen after one row, the likeliest first, and their scores.

    tokens, scores  equally many; a score is the natural log of the estimated chance that the target
                    chooses the token
    proposals       classical rules: the distribution from which each token was sampled
    is_finite       False: the logits were not, so there are no tokens
    """

    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    proposals: tuple[Proposal, ...] = ()
    is_finite: bool = True


NOTHING = Children((), (), is_finite=False)
NONE_ALLOWED = Children((), ())  # the text allows no token that the drafter knows


@dataclass(frozen=True, slots=True)
class Proposed:
    """The result of a Compute: for each of its parts, the children after every asked row.

    children    of a part with further steps: those of its only row, and then those of each further
                step that was made
    num_steps   number of forwards that were made
    model_us    microseconds that they took together
    has_failed  True: there was not enough memory; nothing was computed, and there are no children
    """

    ticket: int
    children: tuple[tuple[Children, ...], ...]
    model_us: int
    num_steps: int = 1
    has_failed: bool = False


Action = SharedAction | Compute
