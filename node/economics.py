"""Measures acceptance on this node, and decides from it and from costs what is worth doing (pure).

Theory of operation
-------------------
A target has one `Acceptance` as long as it lives, for all texts: how often drafts are right, by who
made them. Nothing else on the node estimates it. It is told of every event as it happens, and
returns estimates; asking changes nothing. `Costs` (`node/costs.py`) does the same for times.

Decisions weigh costs as *prices*: an action that takes dt seconds and is expected to make dn more
tokens is worth it if dn > lambda dt, where lambda is the number of tokens a second that are
generated without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import ceil, exp
from operator import itemgetter
from typing import NamedTuple

from node.costs import Passes, Prices
from proto.messages import EARLIER_SOURCE, HEADS_SOURCE, MODEL_SOURCE, NGRAM_SOURCE

# -- acceptance ------------------------------------------------------------------------------------

PRIOR_TRIES = 4.0  # weight of the prior, as a number of tries
MAX_TRIES = 64.0  # with more tries, older ones count less and less
PRIOR_OF_MODEL = 0.7

Kind = tuple[int, int]
"""Class of drafts with one acceptance rate: (source, rank).

Drafts of a model: rank 0 is that of all first children, whatever their score; besides, every child
counts for the rank of its score (`kind_of_score`). All drafters are one source. Copies of n-grams:
the length of the n-gram that was found. Copies of earlier texts: see `kind_of_earlier`.
"""

FIRST_OF_MODEL: Kind = (MODEL_SOURCE, 0)
FIRST_OF_HEADS: Kind = (HEADS_SOURCE, 0)
SCORES_PER_NAT, NUM_SCORES = 4, 20
NUM_SHARES = 4


def kind_of_score(score: float, source: int = MODEL_SOURCE) -> Kind:
    """Return the kind of a model's draft by its score, the natural log of its estimated chance."""
    return source, 1 + min(int(-score * SCORES_PER_NAT), NUM_SCORES - 1)


def kind_of_earlier(match_len: int, share: float) -> Kind:
    """Return the kind of a draft that was copied from earlier texts.

    match_len  number of tokens before it that are the same there
    share      of the places at which its parent was found, the part where it follows; above 0
    """
    return EARLIER_SOURCE, NUM_SHARES * match_len.bit_length() + ceil(NUM_SHARES * share) - 1


@dataclass(slots=True)
class AcceptanceRate:
    """An acceptance rate: `hits` of `tries`, both with those of a prior; 0 < hits <= tries."""

    hits: float
    tries: float = PRIOR_TRIES

    def add(self, *, right: bool) -> None:
        """Count one more try; beyond MAX_TRIES the older ones lose weight."""
        if self.tries >= MAX_TRIES:
            self.hits *= 1 - 1 / MAX_TRIES
            self.tries *= 1 - 1 / MAX_TRIES
        self.hits += right
        self.tries += 1


class Acceptance:
    """The measured acceptance rate of every kind of draft (see `Kind`)."""

    def __init__(self) -> None:
        self._rates: dict[Kind, AcceptanceRate] = {}

    def chance(self, kind: Kind) -> float:
        """Return the chance that a draft of this kind is right, given that those before it are."""
        rate = self._rates.get(kind)
        return _prior(kind) if rate is None else rate.hits / rate.tries

    def add(self, kind: Kind, *, right: bool) -> None:
        """Count whether a draft of this kind was right."""
        rate = self._rates.get(kind)
        if rate is None:
            rate = self._rates[kind] = AcceptanceRate(_prior(kind) * PRIOR_TRIES)
        rate.add(right=right)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert all(0 < rate.hits <= rate.tries <= MAX_TRIES + 1 for rate in self._rates.values())


@cache  # there are few kinds
def _prior(kind: Kind) -> float:
    """Return the chance of a kind before anything was counted: longer n-grams are likelier."""
    source, rank = kind
    if source == NGRAM_SOURCE:
        return rank / (rank + 1)
    if source == EARLIER_SOURCE:
        num_bits, share = divmod(rank, NUM_SHARES)
        match_len = 1 << (num_bits - 1)
        return (share + 1) / NUM_SHARES * match_len / (match_len + 1)
    if rank == 0:
        return PRIOR_OF_MODEL
    return exp(-(rank - 0.5) / SCORES_PER_NAT)  # the middle of the score's range


# -- prices ----------------------------------------------------------------------------------------

# Pure functions of costs and acceptance.

WAIT_S_MIN, WAIT_S_MAX = 0.002, 2.0
# A reply is taken for lost after this many times its usual time, or earlier: after this many times
# the time of a slow reply, and so many seconds.
REPLY_MARGIN = 4.0
SLOW_MARGIN, SLOW_MORE_S = 1.5, 0.05
NUM_BETWEEN = 256  # most passes with drafts in a row
USUAL_ROWS = 8  # drafts of a pass, over which the price of a row is taken
TOO_UNLIKELY, NEARLY_SURE = 0.02, 0.5  # limits of the chance from which a node is expanded in turns


def wait_limit_s(num_awaited: int, prices: Prices, *, is_ahead: bool) -> float:
    """Return for how many seconds to wait for `num_awaited` drafts: longer than they usually take.

    is_ahead  True: the drafter goes on drafting during verification

    The limit is at least the time of a pass, and in WAIT_S_MIN..WAIT_S_MAX. So many drafts save at
    most as many passes, and a drafter that runs ahead can catch up while the target goes on alone:
    for such a drafter no wait is longer than these passes take. A drafter that waits for every
    verdict (`sync`) could never catch up.
    """
    steps_s = num_awaited * prices.draft.value
    usual_s, slow_s = max(prices.reply.value, steps_s), max(prices.reply.slow_s, steps_s)
    limit_s = max(overdue_s(usual_s, slow_s), prices.pass_s)
    if is_ahead:
        limit_s = min(limit_s, num_awaited * prices.pass_s)
    return min(WAIT_S_MAX, max(WAIT_S_MIN, limit_s))


def overdue_s(usual_s: float, slow_s: float) -> float:
    """Return after how many seconds a reply is so late that a message must have been lost.

    usual_s, slow_s  seconds of a usual reply, and of a slow one

    Between hosts most of that time is the network, which takes about the same each time; there a
    few times the usual would be a pause that a reader sees.
    """
    return min(REPLY_MARGIN * usual_s, SLOW_MARGIN * slow_s + SLOW_MORE_S)


def drafting_pays(p: float, step_s: float, token_s: float) -> bool:
    """True if the first draft step after a verdict is worth its time while the target waits for it.

    p        chance that its first child is right
    step_s   seconds of a draft step
    token_s  seconds that a token takes now, with drafts or without

    The threshold is the same with and without drafts, p * seconds per token > step: a pass and a
    step make 1 + p tokens, a pass alone makes one.
    """
    return p * token_s > step_s


def waiting_pays(p: float, num_awaited: int, most: int, prices: Prices) -> bool:
    """True if waiting for `num_awaited` drafts makes more tokens a second than going on alone.

    p     chance that a draft is right
    most  most drafts that a pass verifies

    After a rejection the drafter has nothing to offer for a while. The target can wait for the
    first drafts, or go on alone: that costs a pass for one token, but the drafter runs ahead
    meanwhile, and if its first draft is the token that the target chooses, all drafts below it are
    there when the pass ends. A wait that is short beside a pass pays; so it does on a large target,
    but not on one whose pass costs as much as a few draft steps and messages.
    """
    waiting = tokens_per_second(p, num_awaited, most, prices.pass_s, prices.wait.value)
    return waiting > tokens_per_second(p, 0, most, prices.pass_s, 0.0)


def tokens_per_second(p: float, first: int, most: int, pass_s: float, wait_s: float) -> float:
    """Return the tokens/s of passes of `most` drafts, if a pass without any awaits `first` drafts.

    p       chance that a draft is right
    pass_s  seconds of a pass

    There are two states: with drafts (a pass verifies `most` of them) and without. A pass of k
    drafts makes 1 + p + ... + p^k tokens, and drafts are there afterwards if all k and one more are
    right: p^(k+1).
    """
    return _rate(_chain(p, first, pass_s), _chain(p, most, pass_s), wait_s)


class _Chain(NamedTuple):
    """A pass that verifies a chain of drafts.

    num_tokens  number of tokens that it is expected to make
    all_right   chance that all its drafts are right, and one more
    pass_s      seconds that it takes
    """

    num_tokens: float
    all_right: float
    pass_s: float


def _chain(p: float, num_drafts: int, pass_s: float) -> _Chain:
    """Return the pass of a chain of `num_drafts` drafts, each right with chance `p`."""
    return _Chain(num_expected(p, num_drafts), p ** (num_drafts + 1), pass_s)


def _rate(first: _Chain, most: _Chain, wait_s: float) -> float:
    """Return tokens a second as `tokens_per_second`, for passes that take different times.

    first, most  the pass that finds no drafts at hand, and the pass that does
    wait_s       seconds of the wait before the former
    """
    enters = first.all_right
    share = enters / (enters + 1 - most.all_right)  # share of passes that find drafts at hand
    tokens = (1 - share) * first.num_tokens + share * most.num_tokens
    return tokens / ((1 - share) * (first.pass_s + wait_s) + share * most.pass_s)


def drafts_worth_awaiting(p: float, most: int, prices: Prices) -> int:
    """Return how many drafts in a row to wait for if none is at hand; 0: better to go on alone.

    p     chance that the first draft of a token is right
    most  most drafts in a row that a pass verifies

    The first draft comes with the answer to a verdict, each other one after another step. Meanwhile
    the drafter runs on: when a pass ends, there are as many steps as fit into it. A tree is priced
    by its first children alone: what the others add at the top is missing further down, and with
    the chance of any child this rule waited too long or not at all (docs/LOG.md).
    """
    step_s, reply_s, usual_s = prices.draft.value, prices.reply.value, prices.pass_s
    deepest = min(most, int(usual_s / step_s)) if step_s > 0 else most
    of, powers = prices.passes(1).of, [p**number for number in range(most + 2)]
    passes = [
        _Chain(num_tokens, powers[number + 1], of(1 + number) or usual_s)
        for number, num_tokens in enumerate(accumulate(powers[:-1]))
    ]

    def rate(first: int) -> float:
        """Tokens a second if `first` are awaited, with the best number where drafts are at hand."""
        wait_s = reply_s + (first - 1) * step_s if first else 0.0
        later = passes[first : max(first, deepest) + 1]
        return max([_rate(passes[first], at_hand, wait_s) for at_hand in later])

    return max(range(most + 1), key=rate)


def least_chance(num_texts: int, prices: Prices) -> float:
    """Return how likely a node must be for the drafter to expand it, where the models take turns.

    num_texts  number of texts that share the passes
    """
    price = price_of_draft(prices.draft.value, num_texts, prices.passes(num_texts))
    return min(NEARLY_SURE, max(TOO_UNLIKELY, price))


def price_of_draft(step_s: float, num_texts: int, passes: Passes) -> float:
    """Return what a draft costs in tokens, where the target waits for every draft step.

    step_s     seconds of a draft step
    num_texts  number of texts that share the passes

    The draft costs a step, and a row of the pass that verifies it. That pays if it saves more: its
    chance times the seconds of a token. A draft after which others may follow is worth more than
    its own token, so the chance that the text reaches its parent is to be compared with this price.
    Returns 0 where no pass was measured.
    """
    alone_s = passes.of(num_texts)
    if not alone_s:
        return 0.0
    row_s = (passes.of(num_texts + USUAL_ROWS) - alone_s) / USUAL_ROWS
    return (step_s + row_s) / token_s(alone_s, num_texts, passes)


def num_expected(p: float, num_drafts: int) -> float:
    """Return the expected tokens of a pass with a chain of `num_drafts` drafts.

    They are 1 + p + p^2 + ... + p^num_drafts, if each is right with chance p.
    """
    return sum(p**i for i in range(num_drafts + 1))


def verifying_pays(p: float, num_drafts: int, num_texts: int, passes: Passes) -> bool:
    """True if `num_drafts` drafts of one text are worth their rows in a pass of `num_texts` texts.

    p  chance that each is right, given that those before it are

    Drafts that would not be verified are not worth a wait. The rule is that of `rows_worth`.
    """
    alone_s = passes.of(num_texts)
    more_s = passes.of(num_texts + num_drafts) - alone_s
    return (num_expected(p, num_drafts) - 1.0) * token_s(alone_s, num_texts, passes) >= more_s


def token_s(alone_s: float, num_texts: int, passes: Passes) -> float:
    """Return the seconds of a token; at most those in a plain pass, which takes `alone_s`."""
    least_s = alone_s / num_texts
    return min(passes.token.value or least_s, least_s)


def worth_holding_s(num_tokens: float, num_more: float, pass_s: float) -> float:
    """Return for how many seconds to hold back a pass because drafts for some texts are expected.

    num_tokens  tokens that the pass is expected to make now, of all its texts
    num_more    tokens that the expected drafts would add
    pass_s      seconds of the pass
    """
    return num_more * pass_s / num_tokens


def rows_worth(
    chances: Sequence[Sequence[float]],
    num_fixed: int,
    num_texts: int,
    passes: Passes,
    *,
    may_be_plain: bool = True,
) -> list[int]:
    """Return how many drafts of each text to verify in one pass, the likeliest of all texts.

    The number of drafts is the one that maximises

        sum of their chances - lambda T(num_fixed + their number)

    where T is the seconds of a pass by its rows and 1 / lambda the seconds of a token.

    chances    for each text, the chance that the text reaches each of its drafts, descending
    num_fixed  other rows of the pass: committed tokens, and drafts that are verified anyway
    num_texts  number of texts, each of which gets at least one token from the pass
    may_be_plain  False: other texts have drafts in this pass, whatever is decided here

    On some processors a pass of several rows takes as long as one of a single row, on others five
    times as long; and copies of earlier text are hardly ever right if tokens are sampled. Only what
    is done is measured, so a wrong estimate could stay for ever. Therefore a small part of the time
    goes into passes whose rows do not seem to pay, and if drafts always pay, a pass without drafts
    is made now and then.
    """
    lengths = [len(drafts) for drafts in chances]
    alone_s, num_drafts = passes.of(num_fixed), sum(lengths)
    if not num_drafts or not alone_s:
        return lengths
    if may_be_plain and passes.num_since_plain >= NUM_BETWEEN:
        return [0] * len(chances)
    each_s = token_s(alone_s, num_texts, passes)
    by_chance = sorted(
        [(chance, which) for which, drafts in enumerate(chances) for chance in drafts],
        key=itemgetter(0),
        reverse=True,  # equal chances keep their order
    )
    gains, of = accumulate([chance for chance, _ in by_chance], initial=0.0), passes.of
    values = [gain - of(num_fixed + k) / each_s for k, gain in enumerate(gains)]
    best = max(range(len(values)), key=values.__getitem__)
    if best == 0 and passes.for_trials_s >= passes.of(num_fixed + num_drafts) - alone_s:
        return lengths
    counts = [0] * len(chances)
    for _, which in by_chance[:best]:
        counts[which] += 1
    return counts


def num_rows_worth(chances: Sequence[float], passes: Passes) -> int:
    """Return how many nodes share a draft step: the number that makes most useful drafts a second.

    chances  chance that a text reaches each node, descending; one row each
    """
    gains = list(accumulate(chances))
    steps_s = [passes.of(num_rows) or 1.0 for num_rows in range(1, len(gains) + 1)]
    return 1 + max(range(len(gains)), key=lambda index: gains[index] / steps_s[index])
