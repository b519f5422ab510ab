"""Real processes say exactly what the target alone says."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.api.config import (
    PairConfig,
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from proto.node_config import Placement
from tests.process.reference import (
    EVERY_POLICY,
    PROMPTS,
    Reference,
    assert_same_but_for_near_ties,
    generate,
)
from tests.tiny_models import make_model, make_noised

pytestmark = pytest.mark.process

GREEDY = SamplingParams(max_tokens=128, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=96, ignore_eos=True)
ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "opt", "phi3")
FLOAT32 = PairConfig(dtype="float32", drafter_dtype="float32")


def check_greedy(pair: Pair, reference: Reference, prompt: tuple[int, ...]) -> tuple[int, int]:
    """Compare every policy with the reference; returns (near ties, accepted drafts)."""
    want = reference.greedy(prompt, GREEDY.max_tokens)
    num_ties = num_accepted = 0
    for speculation in EVERY_POLICY:
        got = generate(pair, prompt, speculation, GREEDY)
        what = f"{speculation.policy} K={speculation.num_speculative_tokens}"
        same = assert_same_but_for_near_ties(reference, prompt, want, got.tokens, what)
        num_ties += not same
        num_accepted += got.metrics.num_accepted_tokens
    return num_ties, num_accepted


@pytest.mark.parametrize(
    "prompts",
    [
        PROMPTS[:1],
        pytest.param(PROMPTS[1:2], marks=pytest.mark.long),
        pytest.param(PROMPTS[2:3], marks=pytest.mark.slow),
        pytest.param(PROMPTS[3:], marks=pytest.mark.slow),
    ],
    ids=["one", "another", "more", "others"],
)
def test_greedy_text_of_the_embedded_pair_equals_transformers_generate(
    embedded: Pair, prompts: Sequence[str]
) -> None:
    reference = Reference(FLOAT32.target)
    num_ties = num_accepted = 0
    for prompt in prompts:
        ties, accepted = check_greedy(embedded, reference, embedded.encode(prompt))
        num_ties += ties
        num_accepted += accepted
    # One flipped near tie in a hundred texts is float32; many would be an error of ours.
    assert num_ties <= len(prompts) * len(EVERY_POLICY) // 50
    assert num_accepted > len(prompts) * 50, "speculation is dead"


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["apart", "shared"])
def test_the_text_does_not_depend_on_the_cores_of_a_pass(placement: Placement) -> None:
    reference = Reference(FLOAT32.target)
    with Pair(FLOAT32.model_copy(update={"placement": placement})) as pair:
        ties, accepted = check_greedy(pair, reference, pair.encode(PROMPTS[0]))
    assert ties == 0
    assert accepted > 50


def test_every_policy_gives_the_same_sampled_text_run_after_run(embedded: Pair) -> None:
    for prompt in PROMPTS[:1]:
        ids = embedded.encode(prompt)
        texts = [
            generate(embedded, ids, speculation, SAMPLED).tokens
            for speculation in (*EVERY_POLICY, EVERY_POLICY[2], EVERY_POLICY[-1])
        ]
        assert all(text == texts[0] for text in texts)
        other = SAMPLED.model_copy(update={"seed": 8})
        assert generate(embedded, ids, EVERY_POLICY[0], other).tokens != texts[0]


def test_sampled_drafts_are_accepted_because_the_noise_is_shared(embedded: Pair) -> None:
    got = generate(embedded, embedded.encode(PROMPTS[0]), EVERY_POLICY[2], SAMPLED)
    assert got.metrics.num_accepted_tokens > 0.2 * got.metrics.num_draft_tokens


@pytest.mark.parametrize(
    "num_tokens",
    [pytest.param(40, marks=pytest.mark.long), pytest.param(128, marks=pytest.mark.slow)],
)
def test_reproducible_bfloat16_gives_the_same_text_under_every_policy(num_tokens: int) -> None:
    config = PairConfig(dtype="bfloat16", reproducible=True)
    with Pair(config) as pair:
        for prompt in PROMPTS[:1]:
            ids = pair.encode(prompt)
            for request in (GREEDY, SAMPLED):
                short = request.model_copy(update={"max_tokens": num_tokens})
                texts = [
                    generate(pair, ids, speculation, short).tokens
                    for speculation in (*EVERY_POLICY, EVERY_POLICY[4])
                ]
                assert all(text == texts[0] for text in texts)


def noised_drafter(target: Path, out: Path, prompt: tuple[int, ...]) -> Path:
    """A copy of the target with so much noise that it agrees about half of the time."""
    reference = Reference(target)
    text = [*prompt, *reference.greedy(prompt, 128)]
    low, high = 0.0, 1.5
    for step in range(12):
        sigma = (low + high) / 2
        folder = make_noised(target, out / f"noised-{step}", sigma)
        agreement = Reference(folder).agreement(text, len(prompt))
        if 0.42 <= agreement <= 0.58:
            return folder
        low, high = (sigma, high) if agreement > 0.5 else (low, sigma)
    return folder


def check_architecture(architecture: str, folder: Path) -> None:
    target = make_model(architecture, folder / "target")
    other = make_model("gpt2" if architecture != "gpt2" else "llama", folder / "other", seed=3)
    prompt = (5, 6, 7)
    reference = Reference(target)
    assert len(set(reference.greedy(prompt, 128))) >= 40
    noised = noised_drafter(target, folder, prompt)
    for name, drafter in (("itself", target), ("noised", noised), ("other", other)):
        # A drafter as large as its target is only worth waiting for if the target is slower.
        config = FLOAT32.model_copy(
            update={"target": str(target), "drafter": str(drafter), "simulate_target_ms": 8.0}
        )
        with Pair(config) as pair:
            num_ties, num_accepted = check_greedy(pair, reference, prompt)
            one = generate(
                pair,
                prompt,
                SpeculationConfig(policy="sync", num_speculative_tokens=1, adaptive=False),
                GREEDY,
            )
        assert num_ties <= 1, f"{architecture} drafted by {name}"
        if name == "itself":
            assert one.metrics.acceptance_rate > 0.95, f"{architecture}: speculation is dead"
        if name == "noised":
            assert 0.3 <= one.metrics.acceptance_rate <= 0.7, f"{architecture}: {one.metrics}"
            assert num_accepted > 100


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_of_a_random_model_equals_transformers_generate(
    architecture: str, tmp_path: Path
) -> None:
    check_architecture(architecture, tmp_path)
    assert (tmp_path / "target" / "model.safetensors").exists()
