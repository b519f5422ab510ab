"""What things cost on this node, how often drafts are right, and the prices made of both (pure).

Theory of operation
-------------------
Facts go in, each as it happens, and figures come out; no question changes one. A node has one of
each for as long as it lives, whatever texts it serves:

    Costs       what passes, draft steps and answers take, here and between here and the others
    Acceptance  how often drafts are right, by who made them; nothing else on a node estimates it

Decisions are made of them as *prices*: an action that takes dt and is expected to make dn more
tokens is worth it if dn > lambda dt, with lambda the tokens a second that are written without it.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import ceil, exp
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from proto.messages import EARLIER_SOURCE, HEADS_SOURCE, MODEL_SOURCE, NGRAM_SOURCE, Role
from proto.policies import TABLE

# -- rows ------------------------------------------------------------------------------------------

# Of how many rows forwards are: those that are timed and recorded at load, and prompts.

# Of a prompt, read at once: on a CPU few, because nobody else gets a turn meanwhile; a GPU is idle
# with so few.
PREFILL_CHUNK = 256
PREFILL_CHUNKS: Mapping[str, int] = {"cpu": PREFILL_CHUNK, "cuda": 2048}

TIMED_ROWS: Mapping[Role, tuple[int, ...]] = {
    Role.TARGET: (1, 2, 3, 5, 9, 16),
    Role.DRAFTER: (1, 2, 4, 8, 12),
}
# By backend. A program costs half a minute and a copy of the weights, a graph next to nothing.
RECORDED_ROWS: Mapping[Role, Mapping[str, tuple[int, ...]]] = {
    Role.TARGET: {"compiled": (1, 9), "graphs": (1, 2, 3, 5, 9, 17)},
    Role.DRAFTER: {"compiled": (1, 4), "graphs": (1, 2, 4, 8, 12, 16)},
}
# Children that a drafter chooses of a node; choices of them are recorded at load.
RECORDED_CHILDREN = tuple(sorted({row.branches for row in TABLE}))
# Steps of a chain that one recording makes: no message is heard during them.
CHAINS = (4, 2)


# -- costs -----------------------------------------------------------------------------------------

AVERAGE_WEIGHT = 0.1  # of the newest figure in a running mean, once there are ten
NUM_REPLIES = 16  # the newest of which say how long one may take
SPENT_ON_TRIALS = 0.02  # of the time, at most

Measured = Mapping[int, float]  # seconds of a pass by its rows
NOTHING_KNOWN: Measured = MappingProxyType({})


class Mean:
    """A running mean that begins as the plain mean; 0 while nothing is known."""

    def __init__(self) -> None:
        self.value = 0.0
        self.num = 0

    def add(self, value: float) -> None:
        """One more figure."""
        self.num += 1
        self.value += max(AVERAGE_WEIGHT, 1 / self.num) * (value - self.value)


class Replies:
    """How long a peer takes to answer: in the mean, and when it takes long."""

    def __init__(self) -> None:
        self._mean = Mean()
        self._newest_s: deque[float] = deque(maxlen=NUM_REPLIES)

    @property
    def value(self) -> float:
        """Seconds in the running mean."""
        return self._mean.value

    @property
    def num(self) -> int:
        """Replies so far."""
        return self._mean.num

    def add(self, seconds: float) -> None:
        """One more has come."""
        self._mean.add(seconds)
        self._newest_s.append(seconds)

    @property
    def quickest_s(self) -> float:
        """Seconds of the quickest of the newest; at least one has come."""
        return min(self._newest_s)

    @property
    def slow_s(self) -> float:
        """Three of four take no longer. The few that are late because a message was lost, and
        said again, do not count.
        """
        if not self._newest_s:
            return 0.0
        return sorted(self._newest_s)[3 * (len(self._newest_s) - 1) // 4]


class Passes:
    """What passes of so many texts have taken.

    token             seconds of a token, of whichever text, waits included
    num_since_plain   passes since the last one without drafts
    for_trials_s      saved up for passes whose rows do not seem to pay
    """

    def __init__(self, measured: Measured) -> None:
        self.token = Mean()
        self.num_since_plain = 0
        self.for_trials_s = 0.0
        self._means: dict[int, Mean] = {}  # by rows
        self._known: list[int] = []  # its keys, ascending
        for num_rows, seconds in measured.items():
            self.took(num_rows, seconds)

    def passed(
        self, num_rows: int, num_tokens: int, pass_s: float, round_s: float, *, is_plain: bool
    ) -> None:
        """A pass has made so many tokens; a round is it and the wait before it."""
        self.took(num_rows, pass_s)
        self.token.add(round_s / max(1, num_tokens))
        if is_plain:
            self.num_since_plain = 0
            self.for_trials_s += SPENT_ON_TRIALS * pass_s
        else:
            self.num_since_plain += 1
            self.for_trials_s = 0.0

    def took(self, num_rows: int, pass_s: float) -> None:
        """A pass of so many rows has taken so long."""
        if num_rows not in self._means:
            self._means[num_rows] = Mean()
            insort(self._known, num_rows)
        self._means[num_rows].add(pass_s)

    def of(self, num_rows: int) -> float:
        """What a pass of so many rows is expected to take; 0: nothing is known.

        Between two numbers of rows that were seen, a straight line; beyond the largest, as much as
        that: so more rows are tried.
        """
        known = self._known
        index = bisect_left(known, num_rows)
        if index == len(known):
            return self._means[known[-1]].value if known else 0.0
        above, above_s = known[index], self._means[known[index]].value
        if above == num_rows or index == 0:
            return above_s
        below, below_s = known[index - 1], self._means[known[index - 1]].value
        return below_s + (above_s - below_s) * (num_rows - below) / (above - below)


class Costs:
    """Seconds of everything that a decision weighs.

    measured  passes by their rows, timed before the first text

    draft     of a draft step
    reply     from a verdict to the drafts that answer it
    wait      of the waits that ended with drafts
    """

    def __init__(self, measured: Measured = NOTHING_KNOWN) -> None:
        self.draft = Mean()
        self.reply = Replies()
        self.wait = Mean()
        self.num_skipped = 0  # waits that could have been made, since the last one that was
        self._measured = measured
        self._usual = Mean()  # of a pass, whatever its rows and texts
        self._passes = {1: Passes(measured)}  # by `crowd`

    @property
    def pass_s(self) -> float:
        """What a decoding pass has usually taken; 0: none was made."""
        return self._usual.value

    def passes(self, num_texts: int) -> Passes:
        """What is known of passes of about so many texts."""
        known = self._passes.get(crowd(num_texts))
        return Passes(self._measured) if known is None else known

    def passed(
        self,
        num_texts: int,
        num_rows: int,
        num_tokens: int,
        pass_s: float,
        round_s: float,
        *,
        is_plain: bool,
    ) -> None:
        """A decoding pass has ended; as for `Passes.passed`."""
        self._usual.add(pass_s)
        if pass_s > 0:
            passes = self._passes.setdefault(crowd(num_texts), self.passes(num_texts))
            passes.passed(num_rows, num_tokens, pass_s, round_s, is_plain=is_plain)

    def waited(self, seconds: float) -> None:
        """Drafts have come after so long a wait."""
        self.wait.add(seconds)
        self.num_skipped = 0

    def skipped(self) -> None:
        """A pass has begun without a wait that could have been made."""
        self.num_skipped += 1


def crowd(num_texts: int) -> int:
    """So many texts are alike in what they cost: 1, 2, up to 4, up to 8 ..."""
    return 1 << (num_texts - 1).bit_length()


# -- acceptance ------------------------------------------------------------------------------------

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
    """`hits` of `tries`, with some for a start: above 0 and at most all."""

    hits: float
    tries: float = PRIOR_TRIES

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
        return _prior(kind) if rate is None else rate.hits / rate.tries

    def add(self, kind: Kind, *, right: bool) -> None:
        """What became of one."""
        rate = self._rates.get(kind)
        if rate is None:
            rate = self._rates[kind] = Rate(_prior(kind) * PRIOR_TRIES)
        rate.add(right=right)

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        assert all(0 < rate.hits <= rate.tries <= MAX_TRIES + 1 for rate in self._rates.values())


@cache  # there are few kinds
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


# -- prices ----------------------------------------------------------------------------------------

# Pure functions of costs and acceptance.

WAIT_S_MIN, WAIT_S_MAX = 0.002, 2.0
REPLY_MARGIN = 4.0  # times what it usually takes, and something is lost ...
SLOW_MARGIN, SLOW_MORE_S = 1.5, 0.05  # ... or earlier: so much more than it takes when it is slow
NUM_BETWEEN = 256  # passes with drafts in a row, at most
USUALLY_RIGHT = 0.7  # a first child
USUAL_TOKENS = 2.0  # of a pass with drafts


def wait_limit_s(wanted: int, costs: Costs, *, is_ahead: bool) -> float:
    """How long to wait for so many drafts: more than they usually take, at least a pass.

    is_ahead  the drafter goes on meanwhile

    So many drafts save so many passes at most, and a drafter that runs ahead can catch up while the
    target goes on alone: for it, no wait is longer than that. One that waits for every verdict
    (`sync`) could never catch up.
    """
    steps_s = wanted * costs.draft.value
    usual_s, slow_s = max(costs.reply.value, steps_s), max(costs.reply.slow_s, steps_s)
    limit_s = max(overdue_s(usual_s, slow_s), costs.pass_s)
    if is_ahead:
        limit_s = min(limit_s, wanted * costs.pass_s)
    return min(WAIT_S_MAX, max(WAIT_S_MIN, limit_s))


def overdue_s(usual_s: float, slow_s: float) -> float:
    """After how many seconds an answer is late enough that a message must have been lost.

    usual_s, slow_s  what one usually takes, and what one takes that is slow

    Between hosts nearly all of an answer is the way, which is about as long each time; there a few
    times the usual would be a pause that a reader sees.
    """
    return min(REPLY_MARGIN * usual_s, SLOW_MARGIN * slow_s + SLOW_MORE_S)


def step_pays(chance: float, step_s: float, pass_s: float) -> bool:
    """Whether a draft step is worth it where the target waits meanwhile.

    chance  that the text comes to the node that is expanded

    Its first child saves so much of a pass as a token usually takes, if it is right.
    """
    return chance * USUALLY_RIGHT * pass_s / USUAL_TOKENS > step_s


def drafting_pays(p: float, step_s: float, token_s: float) -> bool:
    """Whether the first draft step after a verdict is worth it where the target waits meanwhile.

    p        chance that its first child is right
    token_s  seconds that a token takes now, with drafts or without

    The same threshold from both sides: (1 + p) tokens in a pass and a step against one in a pass.
    """
    return p * token_s > step_s


def waiting_pays(p: float, wanted: int, most: int, costs: Costs) -> bool:
    """Whether waiting for `wanted` drafts writes more tokens a second than going on alone.

    p     chance that a draft is right
    most  drafts that a pass verifies at most

    After a rejection the drafter has nothing to offer for a while. The target can wait for the
    first drafts, or go on alone: that costs a pass for one token, but the drafter runs ahead
    meanwhile, and if its first draft is what the target says, all that hangs below it is there when
    the pass ends. A wait that is short beside a pass pays; so it does on a large target, and not on
    one whose pass costs as much as a few draft steps and messages.
    """
    waiting = tokens_per_second(p, wanted, most, costs.pass_s, costs.wait.value)
    return waiting > tokens_per_second(p, 0, most, costs.pass_s, 0.0)


def tokens_per_second(p: float, first: int, most: int, pass_s: float, wait_s: float) -> float:
    """Tokens per second where a pass without drafts at hand waits `wait_s` for `first` of them.

    Two states: with drafts (a pass verifies `most` of them) and without. A pass of k drafts makes
    1 + p + ... + p^k tokens, and drafts are there afterwards if all k and one more are right:
    p^(k+1).
    """
    return _rate(_chain(p, first, pass_s), _chain(p, most, pass_s), wait_s)


class _Chain(NamedTuple):
    """A pass of so many drafts in a row.

    num_tokens  that it is expected to make
    all_right   chance that all are right, and one more
    pass_s      that it takes
    """

    num_tokens: float
    all_right: float
    pass_s: float


def _chain(p: float, num_drafts: int, pass_s: float) -> _Chain:
    """The pass of so many, each right with chance `p`."""
    return _Chain(num_expected(p, num_drafts), p ** (num_drafts + 1), pass_s)


def _rate(first: _Chain, most: _Chain, wait_s: float) -> float:
    """The same where each kind of pass takes its own time; `wait_s` comes before the first kind."""
    enters = first.all_right
    share = enters / (enters + 1 - most.all_right)  # of the passes that find drafts at hand
    tokens = (1 - share) * first.num_tokens + share * most.num_tokens
    return tokens / ((1 - share) * (first.pass_s + wait_s) + share * most.pass_s)


def drafts_worth_awaiting(p: float, most: int, costs: Costs) -> int:
    """How many drafts in a row to wait for where none is at hand; 0: to go on alone is better.

    p     chance that the first draft of a token is right
    most  drafts in a row that a pass verifies at most

    The first comes with the answer to a verdict, each other one after another step. Meanwhile the
    drafter runs on: when a pass ends, as many steps are there as fit into it. Of a tree the price
    is that of its first children: what the others add at the top is missing further down, and with
    the chance of any child this rule waited too long or not at all (docs/LOG.md).
    """
    step_s, reply_s, usual_s = costs.draft.value, costs.reply.value, costs.pass_s
    deepest = min(most, int(usual_s / step_s)) if step_s > 0 else most
    of, powers = costs.passes(1).of, [p**number for number in range(most + 2)]
    passes = [
        _Chain(num_tokens, powers[number + 1], of(1 + number) or usual_s)
        for number, num_tokens in enumerate(accumulate(powers[:-1]))
    ]

    def rate(first: int) -> float:
        """At the number of drafts that is best where they are at hand."""
        wait_s = reply_s + (first - 1) * step_s if first else 0.0
        later = passes[first : max(first, deepest) + 1]
        return max([_rate(passes[first], at_hand, wait_s) for at_hand in later])

    return max(range(most + 1), key=rate)


def num_expected(p: float, num_drafts: int) -> float:
    """The tokens that a pass is expected to make of a chain: 1 + p + p^2 + ..."""
    return sum(p**i for i in range(num_drafts + 1))


def verifying_pays(p: float, num_drafts: int, num_texts: int, passes: Passes) -> bool:
    """Whether so many drafts of one text are worth their rows, in a pass that several texts share.

    p  chance that each is right, given that those before it are

    Drafts that would not be verified are not worth a wait. As in `rows_worth`.
    """
    alone_s = passes.of(num_texts)
    more_s = passes.of(num_texts + num_drafts) - alone_s
    return (num_expected(p, num_drafts) - 1.0) * token_s(alone_s, num_texts, passes) >= more_s


def token_s(alone_s: float, num_texts: int, passes: Passes) -> float:
    """Seconds of a token: at most those of a pass without drafts, which are always to be had."""
    least_s = alone_s / num_texts
    return min(passes.token.value or least_s, least_s)


def worth_holding_s(num_tokens: float, num_more: float, pass_s: float) -> float:
    """How long to hold a pass that could start, because drafts for some of its texts are expected.

    num_tokens  that it is expected to make now, of all its texts
    num_more    that those drafts would add
    """
    return num_more * pass_s / num_tokens


def rows_worth(
    chances: Sequence[Sequence[float]], num_fixed: int, num_texts: int, passes: Passes
) -> list[int]:
    """How many drafts of each text to verify together: as many as make the most of

        sum of their chances - lambda T(num_fixed + their number)

    chances    for each text: that it comes to each of its drafts, the likeliest first
    num_fixed  rows of the pass besides: committed tokens, and drafts that are not asked about
    num_texts  that the pass makes a token of whatever is drafted

    On some processors a pass of several rows takes as long as one of a single row, on others five
    times as long; and what is copied from earlier text is hardly ever right where it is sampled.
    What is not done is not measured, and one figure that was wrong would stay so: a share of the
    time may go into passes whose rows do not seem to pay, and where drafts always pay a pass
    without them is made now and then.
    """
    lengths = [len(drafts) for drafts in chances]
    alone_s, num_drafts = passes.of(num_fixed), sum(lengths)
    if not num_drafts or not alone_s:
        return lengths
    if passes.num_since_plain >= NUM_BETWEEN:
        return [0] * len(chances)
    each_s = token_s(alone_s, num_texts, passes)
    by_chance = sorted(
        [(chance, which) for which, drafts in enumerate(chances) for chance in drafts],
        key=itemgetter(0),
        reverse=True,  # equal ones stay in their order
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
    """How many nodes share a draft step: as many as make the most useful drafts a second.

    chances  that a text will come to the node, descending; one row each
    """
    gains = list(accumulate(chances))
    steps_s = [passes.of(num_rows) or 1.0 for num_rows in range(1, len(gains) + 1)]
    return 1 + max(range(len(gains)), key=lambda index: gains[index] / steps_s[index])
