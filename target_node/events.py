"""What the target's machine is told, and what it asks for (pure)."""

from dataclasses import dataclass

from engine.slots import Feed
from node.events import Arrived, Confirmed, SharedAction, Tick
from proto.messages import Logprobs, Proposal, Rule, SamplingSpec


@dataclass(frozen=True, slots=True)
class Computed:
    """A pass is done.

    tokens        the target's choice at each row that was asked for; of a judged pass, the accepted
                  drafts and the token that follows them
    num_accepted  of a judged pass
    logprobs      if they are wanted: of those tokens, as far as they can be committed, or of the
                  tokens that were to be scored
    """

    ticket: int
    tokens: tuple[int, ...]
    model_us: int
    num_accepted: int | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Judge:
    """Judge `drafts` by a classical rule, with luck that is this life's and this pass's own."""

    rule: Rule
    drafts: tuple[int, ...]
    proposals: tuple[Proposal, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `feed`; choose a token at the last `num_asked` rows, which predict `positions`.

    judge   classical rules: instead of choosing at every row, judge the drafts of the pass
    scored  in a prefill: the prompt's tokens that follow the rows, if their logprobs are wanted
    """

    ticket: int
    feed: Feed
    num_asked: int
    positions: tuple[int, ...]
    sampling: SamplingSpec
    judge: Judge | None = None
    scored: tuple[int, ...] = ()

    @property
    def drafted(self) -> tuple[int, ...]:
        """The drafted chain: choice i follows the committed text and the first i of them."""
        return self.feed.tokens[len(self.feed.tokens) - self.num_asked + 1 :]


Event = Arrived | Confirmed | Tick | Computed
Action = SharedAction | Compute
