"""How often drafts are right, by who made them (pure): the one estimator of it on a node."""

from dataclasses import dataclass
from math import ceil, exp

from proto.messages import EARLIER_SOURCE, HEADS_SOURCE, MODEL_SOURCE, NGRAM_SOURCE

PRIOR_TRIES = 4.0
MAX_TRIES = 64.0  # beyond them older tries count less and less
PRIOR_OF_MODEL = 0.7

Kind = tuple[int, int]
"""(source, rank): the first children of a model, of whatever score, have rank 0, and each child has
that of its score besides; all drafters are one source; copies have the length of the n-gram that
was found, those of earlier texts the power of two in it, and how many of the places it was found at
go on like this"""

FIRST_OF_MODEL: Kind = (MODEL_SOURCE, 0)
FIRST_OF_HEADS: Kind = (HEADS_SOURCE, 0)
SCORES_PER_NAT, NUM_SCORES = 4, 20
NUM_SHARES = 4


def kind_of_score(score: float, source: int = MODEL_SOURCE) -> Kind:
    """What a model's child counts as by its score, which is an estimate of its chance."""
    return source, 1 + min(int(-score * SCORES_PER_NAT), NUM_SCORES - 1)


def kind_of_earlier(match_len: int, share: float) -> Kind:
    """What a copy from earlier texts counts as.

    match_len  so many tokens before it are the same there
    share      of the places that its parent came from, those where it follows; above 0
    """
    return EARLIER_SOURCE, NUM_SHARES * match_len.bit_length() + ceil(NUM_SHARES * share) - 1


@dataclass(slots=True)
class Rate:
    """`hits` of `tries`, with some for a start."""

    hits: float
    tries: float = PRIOR_TRIES

    @property
    def chance(self) -> float:
        """The share of hits, above 0 and at most 1."""
        return self.hits / self.tries

    def add(self, *, right: bool) -> None:
        """One more try."""
        if self.tries >= MAX_TRIES:
            self.hits *= 1 - 1 / MAX_TRIES
            self.tries *= 1 - 1 / MAX_TRIES
        self.hits += right
        self.tries += 1


class Acceptance:
    """What is known of every kind of draft."""

    def __init__(self) -> None:
        self._rates: dict[Kind, Rate] = {}

    def chance(self, kind: Kind) -> float:
        """How often such a draft is right, given that those before it are."""
        rate = self._rates.get(kind)
        return _prior(kind) if rate is None else rate.chance

    def add(self, kind: Kind, *, right: bool) -> None:
        """What became of one."""
        if kind not in self._rates:
            self._rates[kind] = Rate(_prior(kind) * PRIOR_TRIES)
        self._rates[kind].add(right=right)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert all(0 < rate.hits <= rate.tries <= MAX_TRIES + 1 for rate in self._rates.values())


def _prior(kind: Kind) -> float:
    """Before anything is known: the longer an n-gram, the likelier."""
    source, rank = kind
    if source == NGRAM_SOURCE:
        return rank / (rank + 1)
    if source == EARLIER_SOURCE:
        num_bits, share = divmod(rank, NUM_SHARES)
        match_len = 1 << (num_bits - 1)
        return (share + 1) / NUM_SHARES * match_len / (match_len + 1)
    if rank == 0:
        return PRIOR_OF_MODEL
    return exp(-(rank - 0.5) / SCORES_PER_NAT)  # as the score says
