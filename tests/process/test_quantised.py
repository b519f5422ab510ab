"""Real processes with quantised checkpoints say what their weights say."""

from pathlib import Path

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from tests.packed_models import RECIPES, save_mxfp4, save_packed
from tests.process.reference import Reference, assert_same_but_for_near_ties, generate
from tests.tiny_models import make_model, make_noised

pytestmark = pytest.mark.process

PROMPT = (5, 6, 7)
GREEDY = SamplingParams(max_tokens=96, ignore_eos=True)
ONE_BY_ONE = SpeculationConfig(policy="sync", num_speculative_tokens=1, adaptive=False)


@pytest.mark.parametrize(
    "kind",
    [
        "gptq-act-order",
        pytest.param("nf4", marks=pytest.mark.long),
        pytest.param("mxfp4", marks=pytest.mark.slow),
    ],
)
def test_a_quantised_target_with_a_quantised_drafter_says_what_transformers_says(
    kind: str, tmp_path: Path
) -> None:
    if kind == "mxfp4":
        target, plain = save_mxfp4(make_model("gpt_oss", tmp_path / "source"), tmp_path / "target")
        noised = make_noised(plain, tmp_path / "noised", 0.02)
        drafter, _ = save_mxfp4(noised, tmp_path / "drafter")
    else:
        source = make_model("llama", tmp_path / "source")
        target, plain = save_packed(source, tmp_path / "target", RECIPES[kind])
        drafter, _ = save_packed(plain, tmp_path / "drafter", RECIPES["fp8-block"])
    reference = Reference(plain)
    want = reference.greedy(PROMPT, GREEDY.max_tokens)
    # A drafter as large as its target is only worth waiting for if the target is slower.
    config = PairConfig(
        target=str(target),
        drafter=str(drafter),
        dtype="float32",
        drafter_dtype="float32",
        simulate_target_ms=8.0,
    )
    num_ties = 0
    with Pair(config) as pair:
        for speculation in (ONE_BY_ONE, SpeculationConfig(policy="auto")):
            got = generate(pair, PROMPT, speculation, GREEDY)
            what = f"{kind} {speculation.policy}"
            num_ties += not assert_same_but_for_near_ties(reference, PROMPT, want, got.tokens, what)
            assert got.metrics.num_accepted_tokens > 0
            if speculation is ONE_BY_ONE:
                # Of a model that is not the same hardly any would be right.
                assert got.metrics.acceptance_rate > 0.5, f"{kind}: {got.metrics}"
                assert got.metrics.num_accepted_tokens > 20
    assert num_ties <= 1
