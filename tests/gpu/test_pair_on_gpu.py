"""Both nodes on one GPU, and the drafter beside it: exact, and drafts are accepted."""

from collections.abc import Iterator

import pytest
import torch

from coordinator.api.config import (
    PairConfig,
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from lab.measure.shares import profile
from tests.process.reference import (
    EVERY_POLICY,
    PROMPTS,
    Reference,
    assert_same_but_for_near_ties,
    generate,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GREEDY = SamplingParams(max_tokens=96, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=96, ignore_eos=True)
CHAIN = SpeculationConfig(policy="pipelined", num_speculative_tokens=8, adaptive=False)


@pytest.fixture(scope="module", params=["cuda:0", "cpu"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    config = PairConfig(
        target_device="cuda:0",
        drafter_device=request.param,
        dtype="float32",
        drafter_dtype="float32",
        max_num_seqs=1,  # recordings and programs of more lanes would not be used
    )
    with Pair(config) as pair:
        yield pair


def test_greedy_text_equals_transformers_generate(pair: Pair) -> None:
    reference = Reference(pair.config.target)
    num_ties = num_accepted = 0
    for prompt in PROMPTS:
        ids = pair.encode(prompt)
        want = reference.greedy(ids, GREEDY.max_tokens)
        for speculation in EVERY_POLICY:
            got = generate(pair, ids, speculation, GREEDY)
            num_ties += not assert_same_but_for_near_ties(
                reference, ids, want, got.tokens, speculation.policy
            )
            num_accepted += got.metrics.num_accepted_tokens
    assert num_ties <= len(PROMPTS) * len(EVERY_POLICY) // 50
    assert num_accepted > len(PROMPTS) * 50, "speculation is dead"


def test_a_seed_gives_one_text_under_every_policy(pair: Pair) -> None:
    for prompt in PROMPTS[:4]:
        ids = pair.encode(prompt)
        texts = [generate(pair, ids, each, SAMPLED).tokens for each in EVERY_POLICY]
        assert all(text == texts[0] for text in texts)


def test_no_pass_falls_off_the_captured_shapes(pair: Pair) -> None:
    ids = [pair.encode(prompt) for prompt in PROMPTS[:3]]
    found = profile(
        pair,
        ids,
        SpeculationConfig(policy="pipelined", num_speculative_tokens=8, adaptive=False),
        SAMPLED,
    )
    assert all(share.num_uncaptured == 0 for share in found.shares)
    assert found.tokens_per_pass > 1.2
