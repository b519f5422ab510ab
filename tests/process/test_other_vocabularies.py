"""Drafters with another tokenizer: the texts are the target's, and drafts are accepted.

The drafters are made of the embedded one's weights (tests/other_vocabulary.py), so most of what it
knows they know too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.metrics import Metrics
from proto.errors import ConfigurationError, IncompatibleError
from proto.installation import MODELS
from rehearsal.lossless.command import rules_for
from tests.other_vocabulary import permuted, smaller, unigram
from tests.process.reference import PROMPTS

pytestmark = pytest.mark.process

AT_ONCE = 50  # more texts are not queued
ALONE = SpeculationConfig(policy="ar")
SYNC = SpeculationConfig(policy="sync", num_speculative_tokens=4, adaptive=False)
TREE, AUTO = SpeculationConfig(policy="tree"), SpeculationConfig(policy="auto")
SEEDED = SamplingParams(max_tokens=60, temperature=0.8, seed=7)
GREEDY = SamplingParams(max_tokens=60, temperature=0)
# Cuts, penalties and banned words: what looks at the target's ids is done by the target alone.
CUT = SamplingParams(
    max_tokens=60, temperature=0.9, seed=9, top_k=40, top_p=0.9, repetition_penalty=1.1
)
# Characters of several bytes, which the target's tokens cut; tabs, empty lines, capital letters.
ODD = (
    "# Grüße an Zoë: 😀 ≠ 中文\n\n\ndef naïve(",
    "\tif x:\n\t\treturn\t1\n\n\n",
    " ",
    "CONSTANT_NAME = 'ÄÖÜ' + \"\u2028\" +",
)


@contextmanager
def pair(make: Callable[[Path], Path], folder: Path) -> Iterator[Pair]:
    """Start the embedded target with this drafter."""
    drafter = make(folder / "drafter")
    # Simulated, so that drafts are worth a wait.
    config = PairConfig(
        drafter=str(drafter), dtype="float32", max_num_seqs=8, simulate_target_ms=4.0
    )
    with Pair(config) as made:
        yield made


def together(
    pair: Pair, prompts: tuple[str, ...], speculation: SpeculationConfig, params: SamplingParams
) -> tuple[list[list[int]], list[Metrics]]:
    """Return the texts of all prompts, many written at once, and what was measured."""
    texts: list[list[int]] = []
    measured: list[Metrics] = []
    for first in range(0, len(prompts), AT_ONCE):
        asked = [pair.encode(one) for one in prompts[first : first + AT_ONCE]]
        streams = [pair.generate(ids, speculation, params)[0] for ids in asked]
        texts += [[token for chunk in stream for token in chunk.tokens] for stream in streams]
        measured += [stream.result.metrics for stream in streams if stream.result is not None]
    return texts, measured


def share(metrics: list[Metrics]) -> float:
    """Return the share of drafts that were accepted."""
    num_drafts = sum(one.num_draft_tokens for one in metrics)
    return sum(one.num_accepted_tokens for one in metrics) / max(1, num_drafts)


def check(pair: Pair, prompts: tuple[str, ...], policies: tuple[SpeculationConfig, ...]) -> None:
    """Compare texts with the target's own, greedy and seeded; drafts must be accepted.

    Not under `auto`: it waits for drafts only where they pay, which on a busy machine none may.
    """
    for params in (GREEDY, SEEDED, CUT):
        alone, _ = together(pair, prompts, ALONE, params)
        for speculation in policies:
            texts, metrics = together(pair, prompts, speculation, params)
            assert texts == alone, (speculation.policy, params.temperature)
            least = {"sync": 0.15, "tree": 0.08}.get(speculation.policy)
            assert least is None or share(metrics) > least, (speculation.policy, params.temperature)


@pytest.mark.parametrize(
    "make",
    [pytest.param(smaller, marks=pytest.mark.long), pytest.param(unigram, marks=pytest.mark.slow)],
)
def test_texts_are_the_targets_and_drafts_are_accepted(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    with pair(make, tmp_path) as started:
        check(started, PROMPTS[:8], (SYNC, TREE))
        check(started, ODD, (AUTO, SYNC))
        assert rules_for(started) == ("coupled",)
        block = SpeculationConfig(verify="block")
        with pytest.raises(ConfigurationError, match="verify block needs a drafter with the"):
            started.generate(started.encode("x"), block, SEEDED)


@pytest.mark.slow
@pytest.mark.parametrize("make", [smaller, unigram, permuted])
def test_a_hundred_texts_are_the_targets(make: Callable[[Path], Path], tmp_path: Path) -> None:
    prompts = tuple(f"{prompt}{end}" for prompt in PROMPTS for end in ("", "#", " ", "\n\n", "x"))
    assert len(prompts) == 100
    with pair(make, tmp_path) as started:
        for params in (GREEDY, SEEDED):
            alone, _ = together(started, prompts, ALONE, params)
            for speculation in (TREE, AUTO):
                texts, metrics = together(started, prompts, speculation, params)
                assert texts == alone
                assert share(metrics) > 0.05


@pytest.mark.slow
def test_the_same_tokens_with_other_numbers_are_drafted_as_well(tmp_path: Path) -> None:
    shares = []
    for make in (permuted, lambda _: MODELS / "drafter"):
        with pair(make, tmp_path) as started:
            _, metrics = together(started, PROMPTS, SYNC, SEEDED)
            shares.append(share(metrics))
    assert shares[0] == pytest.approx(shares[1], abs=0.04)


def test_what_other_vocabularies_cannot_do_is_refused(tmp_path: Path) -> None:
    drafter = smaller(tmp_path / "drafter")
    config = PairConfig(drafter=str(drafter), require_same_tokenizer=True)
    with pytest.raises(IncompatibleError, match="has 2000 tokens, the target's 4096; choose"):
        Pair(config)
    block = SpeculationConfig(verify="block")
    with pytest.raises(ConfigurationError, match="verify block needs a drafter with the target"):
        block.check(PairConfig(drafter=str(drafter)))
