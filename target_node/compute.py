"""What the target's state machine asks of its model (Compute), and the answer (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.layout.slots import Feed
from node.events import SharedAction
from node.placing import Place
from proto.messages import Logprobs, Open, Proposal, Rule

NO_TOKEN = -1  # no choice: the logits are not finite, or the grammar cannot be followed


@dataclass(frozen=True, slots=True)
class Judge:
    """A request to judge `drafts` by a classical rule, instead of choosing a token at every row.

    proposals    the distribution from which each draft was sampled
    incarnation  keys the noise, together with the number of the pass, so that no noise is used
                 twice
    """

    rule: Rule
    drafts: tuple[int, ...]
    proposals: tuple[Proposal, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Part:
    """One text's part of a pass: run `feed`, and choose a token at its last `num_asked` rows.

    number     number of the pass in this life of the text (a life lasts from one Open to the next)
    committed  the text so far, prompt included; the list itself, not a copy
    positions  for each row that is asked, the position of the token that it predicts
    judge      classical rules: instead of choosing at every row, judge the drafts of the pass
    scored     in a prefill: the prompt's tokens that follow the rows, if their logprobs are wanted
    parents    for each drafted row, the row it follows, counted among those asked; the root's is
               row 0
    layers     layers whose features are wanted, of committed rows and of accepted drafts
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
        """Return the drafted token of every drafted row."""
        return self.feed.tokens[len(self.feed.tokens) - self.num_asked + 1 :]

    def paths(self) -> list[tuple[int, ...]]:
        """Return, for each asked row, the drafts between the committed text and its choice."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.drafted, self.parents, strict=True):
            paths.append((*paths[parent], token))
        return paths


@dataclass(frozen=True, slots=True)
class Compute:
    """Run one pass. Its parts are of different lanes; a chunk of a prefill comes alone.

    place  on which CPU cores, where there is a choice
    """

    ticket: int
    parts: tuple[Part, ...]
    place: Place = Place.APART


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Features (hidden states) of rows that follow each other on a path.

    See `messages.Features`.
    """

    dtype: str
    num_rows: int
    data: bytes

    def part(self, start: int, end: int) -> bytes:
        """Return the bytes of rows [start, end)."""
        size = len(self.data) // self.num_rows
        return self.data[start * size : end * size]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a pass for one of its texts.

    tokens        the target's choice at each row that was asked, NO_TOKEN if its logits are not
                  finite or its grammar cannot be followed there; of a judged pass, the accepted
                  drafts, and the token after them if there is one
    num_accepted  of a judged pass: how many drafts were accepted
    logprobs      if wanted: of those tokens, as far as they can be committed, or of the prompt's
                  tokens that were to be scored
    features      if wanted: of the committed rows, and of the accepted drafts
    is_unusual  True: some rows have no choice, or the part was computed again row by row to know
    failure       what people are told if there was not enough memory, and nothing was computed, or
                  if the text's grammar cannot be followed
    is_cause      True: the pass had only this text, so the failure is its own fault
    bad_at        if not None, the text cannot go on with its cache: position of the token whose row
                  is at fault, as far as is known
    """

    tokens: tuple[int, ...]
    num_accepted: int | None = None
    logprobs: Logprobs | None = None
    features: FeatureRows | None = None
    is_unusual: bool = False
    bad_at: int | None = None
    failure: str = ""
    is_cause: bool = False

    @property
    def is_failed(self) -> bool:
        """True if what the pass was to write into the text's lane of the cache is not there."""
        return bool(self.failure) or self.bad_at is not None


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a Compute: an outcome for each of its parts, and the microseconds it took."""

    ticket: int
    outcomes: tuple[Outcome, ...]
    model_us: int


Action = SharedAction | Compute
