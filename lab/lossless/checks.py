"""Checks that a pair writes what its target alone would write, from what the nodes say themselves.

greedy    token for token against the target alone
sampled   many short texts against the target's exact distribution: with top-k of three there are 81
          texts of four tokens, and the logprobs of the 40 prefixes give the chance of each
seeds     under coupled verification the same seed gives the same text under every policy

The sampled check is Pearson's chi-square test. It is also run against a target with a known mistake
(`careless_target.py`), which it must reject: a check that cannot fail says nothing.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from coordinator.api.config import (
    ALONE,
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.session import Emit
from coordinator.text.stream import TokenStream
from proto.messages import Role
from proto.sampling import Logprobs

LEVEL = 1e-4
TOP_K, LENGTH = 3, 4
TEMPERATURE = 1.5
# A greedy difference where the target's two best are closer than this is a near tie.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.03}
POLICIES = (
    SpeculationConfig(policy="sync", num_speculative_tokens=3),
    SpeculationConfig(policy="auto"),
)  # where nobody says which: of each kind one

Text = tuple[int, ...]
Joint = dict[Text, float]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    expected  False for the mistake that must be rejected: there, `held` must be False
    """

    kind: str
    what: str
    held: bool
    detail: str
    expected: bool = True

    @property
    def passed(self) -> bool:
        """Whether the outcome is the right one."""
        return self.held is self.expected


@dataclass(frozen=True, slots=True)
class _Written:
    """A text, its logprobs where they were asked for, and what became of its drafts."""

    tokens: Text
    margins: tuple[float, ...]  # by how much the best token's logprob is above the second's
    best: tuple[dict[int, float], ...]  # the likeliest tokens and their logprobs
    num_drafted: int
    num_accepted: int


def _write(
    pair: Pair, prompt: Text, speculation: SpeculationConfig, params: SamplingParams
) -> _Written:
    (written,) = _write_each(pair, prompt, speculation, [params])
    return written


def _write_each(
    pair: Pair, prompt: Text, speculation: SpeculationConfig, each: Iterable[SamplingParams]
) -> Iterator[_Written]:
    """A text for each parameters, in order; as many at once as the pair has room for."""
    streams: deque[TokenStream] = deque()
    for params in each:
        if len(streams) == pair.num_seqs:
            yield _end_of(streams.popleft())
        streams.append(pair.generate(prompt, speculation, params)[0])
    yield from map(_end_of, streams)


def _end_of(stream: TokenStream) -> _Written:
    tokens: list[int] = []
    best: list[dict[int, float]] = []
    for emit in stream:
        if isinstance(emit, Emit):
            tokens += emit.tokens
            if emit.logprobs is not None:
                best += _rows(emit.logprobs)
    assert stream.result is not None
    metrics = stream.result.metrics
    values = [sorted(row.values(), reverse=True) for row in best]
    margins = tuple(row[0] - row[1] if len(row) > 1 else 0.0 for row in values)
    drafted, accepted = metrics.num_draft_tokens, metrics.num_accepted_tokens
    return _Written(tuple(tokens), margins, tuple(best), drafted, accepted)


def _rows(logprobs: Logprobs) -> list[dict[int, float]]:
    """Per token, the logprob of it and of the likeliest."""
    entries = list(zip(logprobs.ids, logprobs.values, strict=True))
    width = logprobs.width
    return [dict(entries[i * width : (i + 1) * width]) for i in range(len(logprobs))]


def _dtype(pair: Pair) -> str:
    return pair.hello(Role.TARGET).dtype


def greedy(
    pair: Pair, prompts: Sequence[Text], policies: Sequence[SpeculationConfig]
) -> list[Check]:
    """Every policy against the target alone."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    near = NEAR_TIE[_dtype(pair)]
    alone = [
        _write(pair, prompt, ALONE, params.model_copy(update={"logprobs": 2})) for prompt in prompts
    ]
    checks = []
    for policy in policies:
        held, accepted, notes = True, 0, []
        for prompt, want in zip(prompts, alone, strict=True):
            got = _write(pair, prompt, policy, params)
            accepted += got.num_accepted
            pairs = zip_longest(want.tokens, got.tokens)
            at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
            if at is not None:
                held = held and want.margins[at] < near
                notes.append(f"differs at {at}, top-2 margin {want.margins[at]:.4f}")
        total = sum(len(want.tokens) for want in alone)
        detail = f"{total} tokens, {accepted} of them drafted" + "".join(f"; {n}" for n in notes)
        checks.append(Check("greedy", policy.policy, held and accepted > 0, detail))
    return checks


def seeds(
    pair: Pair, prompts: Sequence[Text], policies: Sequence[SpeculationConfig]
) -> list[Check]:
    """The same seed over all policies; in half precision only promised when reproducible."""
    promised = _dtype(pair) == "float32" or pair.config.reproducible
    checks = []
    for policy in policies:
        same = accepted = 0
        for seed, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.8, seed=seed, max_tokens=48, ignore_eos=True)
            got = _write(pair, prompt, policy, params)
            accepted += got.num_accepted
            same += got.tokens == _write(pair, prompt, ALONE, params).tokens
        held = (same == len(prompts) or not promised) and accepted > 0
        detail = f"{same} of {len(prompts)} texts equal those of ar"
        detail += "" if promised else f" (not promised in {_dtype(pair)})"
        checks.append(Check("seeds", policy.policy, held, detail))
    return checks


def joint(pair: Pair, prompt: Text) -> Joint:
    """The chance of every text, from the target's own logprobs."""
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
    pair: Pair, prompt: Text, chances: Joint, speculation: SpeculationConfig, num_texts: int
) -> Check:
    """Texts of `num_texts` seeds against their exact chances."""
    counts: Counter[Text] = Counter()
    drafted = accepted = 0
    params = SamplingParams(
        temperature=TEMPERATURE, top_k=TOP_K, max_tokens=LENGTH, ignore_eos=True
    )
    each = (params.model_copy(update={"seed": seed}) for seed in range(num_texts))
    for got in _write_each(pair, prompt, speculation, each):
        counts[got.tokens] += 1
        drafted += got.num_drafted
        accepted += got.num_accepted
    from lab.lossless.chi_square import (
        p_value as p_value_of,  # scipy takes a second to load
    )

    p_value = p_value_of(counts, chances)
    held = p_value >= LEVEL and accepted > 0
    rate = accepted / max(1, drafted)
    detail = f"p = {p_value:.2g}, {rate:.0%} of {drafted} drafts accepted"
    what = f"{speculation.policy} {speculation.verify}"
    return Check("sampled", what, held, detail)


def careless(
    pair: Pair, prompt: Text, chances: Joint, speculation: SpeculationConfig, num_texts: int
) -> Check:
    """The sampled check of a pair whose target is `careless_target.py`: it must not hold."""
    judged = speculation.model_copy(update={"verify": "token"})
    check = sampled(pair, prompt, chances, judged, num_texts)
    return replace(check, what=f"{speculation.policy} careless", expected=False)


def detectable(num_texts: int, chances: Joint) -> float:
    """The effect size (Cohen's w) that so many texts reveal with a probability of 0.95."""
    from lab.lossless.chi_square import detectable as detectable_by

    return detectable_by(num_texts, chances, level=LEVEL)
