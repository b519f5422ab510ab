"""What the machines of the target ask of its model, a Compute, and what it says (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.layout.slots import Feed
from node.follower import SharedAction
from proto.messages import Logprobs, Open, Proposal, Rule

NO_TOKEN = -1  # no choice: the logits are not finite


@dataclass(frozen=True, slots=True)
class Judge:
    """Judge `drafts` by a classical rule, with luck that is this life's and this pass's own."""

    rule: Rule
    drafts: tuple[int, ...]
    proposals: tuple[Proposal, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Part:
    """One text's part of a pass: run `feed`, and choose a token at the last `num_asked` rows, which
    predict `positions`.

    number     of the pass in this life of the text
    committed  the text so far, prompt included; as it is, not a copy
    judge      classical rules: instead of choosing at every row, judge the drafts of the pass
    scored     in a prefill: the prompt's tokens that follow the rows, if their logprobs are wanted
    parents    of each drafted row, which of the rows that are asked it follows; the root's is row 0
    layers     of which the features of committed rows are wanted, and of those that are accepted
    """

    opened: Open
    number: int
    committed: Sequence[int]
    feed: Feed
    num_asked: int
    positions: tuple[int, ...]
    judge: Judge | None = None
    scored: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()

    @property
    def drafted(self) -> tuple[int, ...]:
        """The token of every drafted row."""
        return self.feed.tokens[len(self.feed.tokens) - self.num_asked + 1 :]

    def paths(self) -> list[tuple[int, ...]]:
        """Per row that is asked, the drafts between the committed text and its choice."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.drafted, self.parents, strict=True):
            paths.append((*paths[parent], token))
        return paths


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a pass. Its parts are of different lanes; a chunk of a prefill comes alone."""

    ticket: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Features of rows that follow each other on a path; see `proto.messages.Features`."""

    dtype: str
    num_rows: int
    data: bytes

    def part(self, start: int, end: int) -> bytes:
        """Of these rows."""
        size = len(self.data) // self.num_rows
        return self.data[start * size : end * size]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass has said about one of its texts.

    tokens        the target's choice at each row that was asked for, NO_TOKEN where the logits are
                  not finite; of a judged pass, the accepted drafts and the token that follows
                  them, if there is one
    num_accepted  of a judged pass
    logprobs      if they are wanted: of those tokens, as far as they can be committed, or of the
                  tokens that were to be scored
    features      if they are wanted: of the committed rows, and of the drafts that are accepted
    was_repeated  some logits were not finite, so it was made again row by row
    failure       memory was missing, and nothing was computed: what people are told
    is_cause      the pass was of this text alone
    bad_at        the text cannot go on with what is cached: the position of the token that is at
                  fault, as far as is known
    """

    tokens: tuple[int, ...]
    num_accepted: int | None = None
    logprobs: Logprobs | None = None
    features: FeatureRows | None = None
    was_repeated: bool = False
    bad_at: int | None = None
    failure: str = ""
    is_cause: bool = False


@dataclass(frozen=True, slots=True)
class Computed:
    """A pass is done; an outcome for each of its parts."""

    ticket: int
    outcomes: tuple[Outcome, ...]
    model_us: int


Action = SharedAction | Compute
