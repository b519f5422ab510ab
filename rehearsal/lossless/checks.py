"""Checks that a pair writes what its target alone would write, from what the nodes report.

greedy    compared token by token with the target alone. In a number type whose passes of several
          rows round differently from passes of one row, a text may differ at a near tie: the two
          tokens have almost the same probability. Such texts are counted and never called equal
seeds     under coupled verification the same seed gives the same text under every policy. This is
          promised in float32, and in every type with `--reproducible`; otherwise it is not tested
sampled   many short texts are compared with the target's exact distribution: with top-k of 3 there
          are 81 texts of 4 tokens, and the logprobs after the 40 prefixes give the chance of each

A drafter that rests, because its target is faster alone, drafts nothing, so that nothing is proved
about drafts. Then the texts are written again without resting (`adaptive=False`).

The sampled check is Pearson's chi-square test. It is also run against a target with a known mistake
(`careless_target.py`), which it must reject: a check that cannot fail proves nothing.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from coordinator.api.config import (
    ALONE,
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.session_events import Emit
from coordinator.text.stream import TokenStream
from proto.messages import Role
from proto.sampling import Logprobs

LEVEL = 1e-4
TOP_K, LENGTH = 3, 4
TEMPERATURE = 1.5
GREEDY_LENGTH, SEED_LENGTH = 64, 48
NUM_TIMED = 5  # short texts that are timed to predict how long all checks take
# Two tokens whose logprobs are closer than this are a near tie. Of an exact target, and with
# --reproducible, there is none: every pass has the same bits.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.03}
ALTERNATIVES = 5  # logprobs (of the likeliest tokens) that are asked for each greedy token
POLICIES = (
    SpeculationConfig(policy="sync", num_speculative_tokens=3),
    SpeculationConfig(policy="auto"),
)  # the policies that are tested by default: one that waits, and one that runs ahead

Tokens = tuple[int, ...]
Joint = dict[Tokens, float]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    kind, what     the check (greedy, seeds, sampled), and the policy or rule that it was run on
    held           True if the check found no mistake
    expected       False for the planted mistake that must be found: there, `held` must be False
    num_near_ties  greedy texts that differ from the target's own, at a near tie
    tested         False if nothing is promised: then nothing was run, and `held` means nothing
    """

    kind: str
    what: str
    held: bool
    detail: str
    expected: bool = True
    num_near_ties: int = 0
    tested: bool = True

    @property
    def passed(self) -> bool:
        """Return True if the outcome is the expected one."""
        return self.held is self.expected


@dataclass(frozen=True, slots=True)
class Written:
    """A generated text, its logprobs if they were asked for, and its numbers of drafts."""

    tokens: Tokens
    best: tuple[dict[int, float], ...]  # for each token, the likeliest tokens and their logprobs
    num_drafted: int
    num_accepted: int


def _write(
    pair: Pair, prompt: Tokens, speculation: SpeculationConfig, params: SamplingParams
) -> Written:
    """Generate one text and return it."""
    (written,) = _write_each(pair, prompt, speculation, [params])
    return written


def _write_each(
    pair: Pair, prompt: Tokens, speculation: SpeculationConfig, each: Iterable[SamplingParams]
) -> Iterator[Written]:
    """Yield a text for each of the parameters, in order; as many run at once as the pair allows."""
    streams: deque[TokenStream] = deque()
    for params in each:
        if len(streams) == pair.num_seqs:
            yield _end_of(streams.popleft())
        streams.append(pair.generate(prompt, speculation, params)[0])
    yield from map(_end_of, streams)


def with_drafts(
    write: Callable[[SpeculationConfig], list[Written]], policy: SpeculationConfig
) -> list[list[Written]]:
    """Return the texts that `write` makes under a policy; again if the drafter has only rested."""
    got = write(policy)
    if any(one.num_drafted for one in got):
        return [got]
    return [got, write(policy.model_copy(update={"adaptive": False}))]


def _end_of(stream: TokenStream) -> Written:
    """Read a stream to its end and return its text."""
    tokens: list[int] = []
    best: list[dict[int, float]] = []
    for emit in stream:
        if isinstance(emit, Emit):
            tokens += emit.tokens
            if emit.logprobs is not None:
                best += _rows(emit.logprobs)
    assert stream.result is not None
    metrics = stream.result.metrics
    drafted, accepted = metrics.num_draft_tokens, metrics.num_accepted_tokens
    return Written(tuple(tokens), tuple(best), drafted, accepted)


def _rows(logprobs: Logprobs) -> list[dict[int, float]]:
    """Return for each token the logprobs (by token id) of it and of the likeliest tokens."""
    entries = list(zip(logprobs.ids, logprobs.values, strict=True))
    width = logprobs.width
    return [dict(entries[i * width : (i + 1) * width]) for i in range(len(logprobs))]


def near_tie(dtype: str, *, is_exact: bool) -> float:
    """Return the difference of two logprobs below which they are a near tie; 0: there are none."""
    return 0.0 if is_exact else NEAR_TIE[dtype]


def is_exact(pair: Pair) -> bool:
    """True if no bit of a text may depend on drafts, on other texts or on how it was read."""
    return pair.config.reproducible or bool(pair.hello(Role.TARGET).bits)


def greedy(
    pair: Pair, prompts: Sequence[Tokens], policies: Sequence[SpeculationConfig]
) -> list[Check]:
    """Compare each policy's greedy texts with the target's alone; return a line per policy."""
    params = SamplingParams(max_tokens=GREEDY_LENGTH, ignore_eos=True)
    near = near_tie(pair.hello(Role.TARGET).dtype, is_exact=is_exact(pair))
    with_logprobs = params.model_copy(update={"logprobs": ALTERNATIVES})
    alone = [_write(pair, prompt, ALONE, with_logprobs) for prompt in prompts]
    checks = []
    for policy in policies:
        takes = with_drafts(
            lambda by: [_write(pair, prompt, by, params) for prompt in prompts], policy
        )
        differences = [
            difference(want.tokens, want.best, written.tokens)
            for got in takes
            for want, written in zip(alone, got, strict=True)
        ]
        accepted = sum(written.num_accepted for got in takes for written in got)
        checks.append(greedy_check(policy.policy, alone[0].tokens, differences, accepted, near))
    return checks


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a text differs from the target's own.

    at      index of the token
    margin  logprob of the target's own token minus that of the other one, as the target alone
            computes both; infinite if the other one is not among its likeliest
    """

    at: int
    margin: float


def difference(want: Tokens, best: Sequence[dict[int, float]], got: Tokens) -> Difference | None:
    """Return the first difference of `got` from the target's text `want`; None if they are equal.

    best  for each token of `want`, the target's likeliest tokens and their logprobs
    """
    for at, (own, other) in enumerate(zip(want, got, strict=False)):
        if own != other:
            return Difference(at, best[at][own] - best[at].get(other, -math.inf))
    shorter = min(len(want), len(got))
    return None if len(want) == len(got) else Difference(shorter, math.inf)


def greedy_check(
    what: str, one: Tokens, differences: Sequence[Difference | None], accepted: int, near: float
) -> Check:
    """Return the report line of one policy.

    one          a text of the target alone; all texts have its length
    differences  one for each prompt
    accepted     accepted drafts in all texts; if there is none, the check fails
    near         a difference with a smaller margin is a near tie
    """
    found = [each for each in differences if each is not None]
    wrong = [each for each in found if not each.margin < near]
    notes = [f"differs at token {each.at}, by {each.margin:.4f} in logprob" for each in found]
    num_tokens = len(one) * len(differences)
    detail = "; ".join([f"{num_tokens} tokens, {accepted} of them drafted", *notes])
    held = not wrong and accepted > 0
    return Check("greedy", what, held, detail, num_near_ties=len(found) - len(wrong))


def seeds(
    pair: Pair, prompts: Sequence[Tokens], policies: Sequence[SpeculationConfig]
) -> list[Check]:
    """Compare each policy's sampled texts with plain ones; or a single check says "not tested".

    Plain texts are the target's own, of equal seeds. Returns a check per policy. Not tested: equal
    texts are not promised.
    """
    dtype = pair.hello(Role.TARGET).dtype
    if not seeds_promised(dtype, is_exact=is_exact(pair)):
        return [not_tested(dtype)]
    each = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=SEED_LENGTH, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    texts = list(zip(prompts, each, strict=True))
    alone = [_write(pair, prompt, ALONE, params).tokens for prompt, params in texts]
    checks = []
    for policy in policies:
        takes = with_drafts(
            lambda by: [_write(pair, prompt, by, params) for prompt, params in texts], policy
        )
        got = [one for take in takes for one in take]
        same = sum(one.tokens == want for one, want in zip(got, alone * len(takes), strict=True))
        held = same == len(got) and any(one.num_accepted for one in got)
        detail = f"{same} of {len(got)} texts equal those of ar"
        checks.append(Check("seeds", policy.policy, held, detail))
    return checks


def seeds_promised(dtype: str, *, is_exact: bool) -> bool:
    """True if the seed alone decides a text, whatever the policy."""
    return dtype == "float32" or is_exact


def not_tested(dtype: str) -> Check:
    """Return the report line about seeds for a number type that promises nothing about them."""
    detail = f"{dtype} needs --reproducible for it"
    return Check("seeds", "all policies", held=True, detail=detail, tested=False)


def joint(pair: Pair, prompt: Tokens) -> Joint:
    """Return the probability of every text of LENGTH tokens, from the target's own logprobs."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=TOP_K)
    chances: Joint = {(): 1.0}
    for _ in range(LENGTH):
        longer: Joint = {}
        for text, chance in chances.items():
            (best,) = _write(pair, prompt + text, ALONE, params).best
            likeliest = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:TOP_K]
            weights = [math.exp(value / TEMPERATURE) for _, value in likeliest]
            for (token, _), weight in zip(likeliest, weights, strict=True):
                longer[(*text, token)] = chance * weight / sum(weights)
        chances = longer
    return chances


def sampled(
    pair: Pair, prompt: Tokens, chances: Joint, speculation: SpeculationConfig, num_texts: int
) -> Check:
    """Test texts of `num_texts` seeds against their exact probabilities; return the report line."""
    params = SamplingParams(
        temperature=TEMPERATURE, top_k=TOP_K, max_tokens=LENGTH, ignore_eos=True
    )
    each = [params.model_copy(update={"seed": seed}) for seed in range(num_texts)]
    *_, got = with_drafts(lambda by: list(_write_each(pair, prompt, by, each)), speculation)
    counts = Counter(one.tokens for one in got)
    drafted = sum(one.num_drafted for one in got)
    accepted = sum(one.num_accepted for one in got)
    from rehearsal.lossless.chi_square import (
        p_value as p_value_of,  # scipy takes a second to load
    )

    p_value = p_value_of(counts, chances)
    held = p_value >= LEVEL and accepted > 0
    rate = accepted / max(1, drafted)
    detail = f"p = {p_value:.2g}, {rate:.0%} of {drafted} drafts accepted"
    what = f"{speculation.policy} {speculation.verify}"
    return Check("sampled", what, held, detail)


def careless(
    pair: Pair, prompt: Tokens, chances: Joint, speculation: SpeculationConfig, num_texts: int
) -> Check:
    """Run the sampled check on a pair whose target is `careless_target.py`: it must not hold."""
    judged = speculation.model_copy(update={"verify": "token"})
    check = sampled(pair, prompt, chances, judged, num_texts)
    return replace(check, what="planted mistake", expected=False)


def detectable(num_texts: int, chances: Joint) -> float:
    """Return the effect size (Cohen's w) that so many texts reveal with a probability of 0.95."""
    from rehearsal.lossless.chi_square import detectable as detectable_by

    return detectable_by(num_texts, chances, level=LEVEL)


@dataclass(frozen=True, slots=True)
class Pace:
    """The measured times of a pair, in seconds, from which the duration of checks is estimated.

    start_s  to load both models and become ready
    long_s   for a text of `GREEDY_LENGTH` tokens, written by the target alone
    short_s  for a text of `LENGTH` tokens with drafts
    """

    start_s: float
    long_s: float
    short_s: float

    def duration_s(self, num_prompts: int, num_policies: int, num_rules: int, texts: int) -> float:
        """Return how long all checks and the second start will take, as if drafts saved no time.

        texts  sampled texts for each policy and rule
        """
        each = self.long_s * (1 + SEED_LENGTH / GREEDY_LENGTH)
        prefixes: int = sum(TOP_K**depth for depth in range(LENGTH))
        short = prefixes + (num_rules * num_policies + 1) * texts
        long = num_prompts * (1 + num_policies)
        return self.start_s + long * each + short * self.short_s


def pace(pair: Pair, prompt: Tokens, policy: SpeculationConfig, start_s: float) -> Pace:
    """Return how long the pair takes: times short texts and a long one, after a warm-up."""
    long = SamplingParams(max_tokens=GREEDY_LENGTH, ignore_eos=True)
    short = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    _write(pair, prompt, policy, short)
    begun = time.monotonic()
    list(_write_each(pair, prompt, policy, [short] * NUM_TIMED))
    between = time.monotonic()
    _write(pair, prompt, ALONE, long)
    ended = time.monotonic()
    return Pace(start_s, ended - between, (between - begun) / NUM_TIMED)
