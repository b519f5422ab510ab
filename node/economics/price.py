"""Decisions as prices: pure functions of what things cost and how often drafts are right.

An action that takes dt and is expected to make dn more tokens is worth it if dn > lambda dt, with
lambda the tokens a second that are written without it.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from node.economics.costs import Costs, Passes

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
    return _rate(p, first, most, pass_s + wait_s, pass_s)


def _rate(p: float, first: int, most: int, first_s: float, most_s: float) -> float:
    """The same where each kind of pass takes its own time, with what is waited before it."""
    enters, stays = p ** (first + 1), p ** (most + 1)
    share = enters / (enters + 1 - stays)  # of the passes that find drafts at hand
    tokens = (1 - share) * num_expected(p, first) + share * num_expected(p, most)
    return tokens / ((1 - share) * first_s + share * most_s)


def drafts_worth_awaiting(p: float, most: int, costs: Costs) -> int:
    """How many drafts in a row to wait for where none is at hand; 0: to go on alone is better.

    p     chance that the first draft of a token is right
    most  drafts in a row that a pass verifies at most

    The first comes with the answer to a verdict, each other one after another step. Meanwhile the
    drafter runs on: when a pass ends, as many steps are there as fit into it. Of a tree the price
    is that of its first children: what the others add at the top is missing further down, and with
    the chance of any child this rule waited too long or not at all (docs/LOG.md).
    """
    step_s, passes = costs.draft.value, costs.passes(1)
    deepest = min(most, int(costs.pass_s / step_s)) if step_s > 0 else most

    def rate(first: int) -> float:
        """At the number of drafts that is best where they are at hand."""
        wait_s = costs.reply.value + (first - 1) * step_s if first else 0.0
        first_s = (passes.of(1 + first) or costs.pass_s) + wait_s
        return max(
            _rate(p, first, depth, first_s, passes.of(1 + depth) or costs.pass_s)
            for depth in range(first, max(first, deepest) + 1)
        )

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
        ((chance, which) for which, drafts in enumerate(chances) for chance in drafts),
        key=lambda pair: -pair[0],
    )
    values = [
        gain - passes.of(num_fixed + k) / each_s
        for k, gain in enumerate(accumulate((chance for chance, _ in by_chance), initial=0.0))
    ]
    best = max(range(len(values)), key=values.__getitem__)
    if best == 0 and passes.for_trials_s >= passes.of(num_fixed + num_drafts) - alone_s:
        return lengths
    chosen = Counter(which for _, which in by_chance[:best])
    return [chosen[which] for which in range(len(chances))]


def num_rows_worth(chances: Sequence[float], passes: Passes) -> int:
    """How many nodes share a draft step: as many as make the most useful drafts a second.

    chances  that a text will come to the node, descending; one row each
    """
    gains = list(accumulate(chances))
    steps_s = [passes.of(num_rows) or 1.0 for num_rows in range(1, len(gains) + 1)]
    return 1 + max(range(len(gains)), key=lambda index: gains[index] / steps_s[index])
