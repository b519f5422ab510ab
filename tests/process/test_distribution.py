"""Texts that real processes sample are distributed as the target says, exactly.

Top-k of three leaves 81 texts of four tokens, whose chances are computed from the model itself.
Every text has a seed of its own. One sample against the exact joint distribution, by Pearson's
chi-square test at a level of 1e-4; the planted mistakes show that it has power.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from coordinator.api.config import (
    PairConfig,
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.cluster import launcher
from coordinator.lossless.chi_square import p_value
from coordinator.text.stream import Stream
from engine.sampling import Sampling, process
from proto.messages import Role
from tests.process.biased_target import BIASES
from tests.process.reference import Reference
from tests.tiny_models import make_model, make_noised

pytestmark = pytest.mark.process

NUM_TEXTS, NUM_TEXTS_SLOW = 2_000, 20_000
NUM_TEXTS_BIASED = 500  # at a time, until the mistake is seen
LENGTH, TOP_K, TEMPERATURE = 4, 3, 2.0
LEVEL = 1e-4
PROMPT = (11, 5, 77, 8)
SYNC = {"policy": "sync", "num_speculative_tokens": 3}
PIPELINED = {"policy": "pipelined", "num_speculative_tokens": 3}
Joint = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> PairConfig:
    folder = tmp_path_factory.mktemp("models")
    target = make_model("llama", folder / "target")
    drafter = make_noised(target, folder / "drafter", 0.25)
    return PairConfig(target=str(target), drafter=str(drafter), dtype="float32", max_model_len=128)


@pytest.fixture(scope="module")
def joint(models: PairConfig) -> Joint:
    """The exact chance of every text."""
    model = Reference(Path(models.target)).model
    chances: Joint = {(): 1.0}
    for _ in range(LENGTH):
        longer: Joint = {}
        for text, chance in chances.items():
            with torch.inference_mode():
                logits = model(torch.tensor([[*PROMPT, *text]])).logits[0, -1:]
            p = process(logits, Sampling(TEMPERATURE, TOP_K)).double().softmax(dim=1)[0]
            for token in torch.nonzero(p)[:, 0].tolist():
                longer[(*text, token)] = chance * float(p[token])
        chances = longer
    assert len(chances) == TOP_K**LENGTH
    return chances


def sample(
    pair: Pair, speculation: SpeculationConfig, seeds: range
) -> tuple[Counter[tuple[int, ...]], float]:
    """A text of each seed, and the share of drafts that were accepted.

    Several are written at once, as many as the nodes have room for.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    streams: deque[Stream] = deque()
    left = list(reversed(seeds))
    while left or streams:
        if left and len(streams) < pair.config.num_seqs:
            request = SamplingParams(
                temperature=TEMPERATURE,
                top_k=TOP_K,
                seed=left.pop(),
                max_tokens=LENGTH,
                ignore_eos=True,
            )
            streams.append(pair.generate(PROMPT, speculation, request)[0])
            continue
        stream = streams.popleft()
        counts[tuple(token for emit in stream for token in emit.tokens)] += 1
        assert stream.result is not None
        drafted += stream.result.metrics.num_draft_tokens
        accepted += stream.result.metrics.num_accepted_tokens
    return counts, accepted / max(1, drafted)


CASES = [
    (verify, policy, candidates)
    for (verify, candidates), policy in product(
        (("coupled", 64), ("token", 64), ("block", 64), ("token", 2), ("block", 2)),
        (SYNC, PIPELINED),
    )
]


@pytest.fixture(scope="module")
def pair_of(models: PairConfig) -> Iterator[Callable[[int], Pair]]:
    """The pair whose drafts are sampled from so many candidates, started when it is asked for."""
    with ExitStack() as stack:

        @cache
        def started(candidates: int) -> Pair:
            config = models.model_copy(update={"max_draft_candidates": candidates})
            return stack.enter_context(Pair(config))

        yield started


def assert_exact(
    pair_of: Callable[[int], Pair],
    joint: Joint,
    case: tuple,  # type: ignore[type-arg]
    num_texts: int,
) -> None:
    verify, policy, candidates = case
    speculation = SpeculationConfig(**policy, verify=verify)
    counts, rate = sample(pair_of(candidates), speculation, range(num_texts))
    assert p_value(counts, joint) > LEVEL
    assert 0.1 < rate < 0.95, "speculation is dead, or there is nothing to verify"


@pytest.mark.long
@pytest.mark.parametrize("case", CASES[:6], ids=str)
def test_texts_are_distributed_as_the_targets(
    pair_of: Callable[[int], Pair],
    joint: Joint,
    case: tuple,  # type: ignore[type-arg]
) -> None:
    assert_exact(pair_of, joint, case, NUM_TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_texts_are_distributed_as_the_targets(
    pair_of: Callable[[int], Pair],
    joint: Joint,
    case: tuple,  # type: ignore[type-arg]
) -> None:
    assert_exact(pair_of, joint, case, NUM_TEXTS_SLOW)


@pytest.mark.long
@pytest.mark.parametrize("bias", [bias.__name__ for bias in BIASES])
def test_a_mistake_of_the_target_is_seen(
    models: PairConfig, joint: Joint, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(launcher.MODULES, Role.TARGET, "tests.process.biased_target")
    monkeypatch.setenv("SLIPSTREAM_TEST_BIAS", bias)
    counts: Counter[tuple[int, ...]] = Counter()
    with Pair(models) as pair:
        for first in range(0, NUM_TEXTS_SLOW, NUM_TEXTS_BIASED):
            # A busy machine has drafts that come too late, which hide a mistake in judging them.
            seeds = range(first, first + NUM_TEXTS_BIASED)
            counts += sample(pair, SpeculationConfig(**SYNC, verify="token"), seeds)[0]
            if p_value(counts, joint) < LEVEL:
                break
    assert p_value(counts, joint) < LEVEL
