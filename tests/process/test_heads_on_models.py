"""Heads with random weights on random models: their drafts are worth little, and change no text."""

from pathlib import Path

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from tests.engine.heads.checkpoints import checkpoint
from tests.process.reference import Reference, assert_same_but_for_near_ties, generate
from tests.tiny_models import make_model

pytestmark = [pytest.mark.process, pytest.mark.long]

PROMPT = tuple(range(3, 43))  # more than a pass takes beside drafts
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
# Where the target is unsure, the noise that both share makes them agree.
SAMPLED = SamplingParams(temperature=3.0, seed=5, max_tokens=48, ignore_eos=True)
AR = SpeculationConfig(policy="ar")
POLICIES = (
    SpeculationConfig(policy="tree"),
    SpeculationConfig(policy="sync", num_speculative_tokens=3, adaptive=False),
    SpeculationConfig(policy="pipelined", adaptive=False),
)


@pytest.mark.parametrize(
    ("architecture", "layout", "home"),
    [
        ("llama", "eagle3", "own"),
        ("llama", "medusa", "target"),
        ("qwen3", "eagle", "own"),
        ("gpt2", "eagle", "target"),
    ],
)
def test_heads_change_no_text_of_other_models(
    architecture: str, layout: str, home: str, tmp_path: Path
) -> None:
    target = make_model(architecture, tmp_path / "target")
    head = checkpoint(layout).save(tmp_path / "head")
    config = PairConfig(
        target=str(target),
        drafter=str(head),
        drafter_home=home,  # type: ignore[arg-type]
        dtype="float32",
        drafter_dtype="float32",
        max_model_len=128,
    )
    reference = Reference(target)
    want = reference.greedy(PROMPT, GREEDY.max_tokens or 0)
    with Pair(config) as pair:
        sampled = generate(pair, PROMPT, AR, SAMPLED).tokens
        num_drafted = num_accepted = 0
        for speculation in POLICIES:
            what = f"{speculation.policy} with {layout}"
            got = generate(pair, PROMPT, speculation, GREEDY)
            assert_same_but_for_near_ties(reference, PROMPT, want, got.tokens, what)
            also = generate(pair, PROMPT, speculation, SAMPLED)
            assert also.tokens == sampled, what
            num_drafted += also.metrics.num_draft_tokens
            num_accepted += also.metrics.num_accepted_tokens
    assert num_drafted > 50
    assert num_accepted > 0, "speculation is dead"
