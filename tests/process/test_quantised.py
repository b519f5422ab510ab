"""Real processes with quantised checkpoints say what their weights say."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from engine.checkpoint.model import load_model
from engine.quantised.linear import QuantisedLinear
from tests.gguf_models import save_gguf
from tests.packed_models import RECIPES, save_mxfp4, save_packed
from tests.process.reference import Reference, assert_same_but_for_near_ties, generate
from tests.tiny_models import make_model, make_noised

pytestmark = pytest.mark.process

PROMPT = (5, 6, 7)
GREEDY = SamplingParams(max_tokens=96, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=96, ignore_eos=True, temperature=0.8, seed=7)
ONE_BY_ONE = SpeculationConfig(policy="sync", num_speculative_tokens=1, adaptive=False)


@pytest.mark.parametrize(
    "kind",
    [
        "gptq",  # its codes stay
        pytest.param("gptq-act-order", marks=pytest.mark.slow),
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
    # A drafter as large as its target is only worth waiting for if the target is slower.
    config = PairConfig(
        target=str(target),
        drafter=str(drafter),
        dtype="float32",
        drafter_dtype="float32",
        simulate_target_ms=8.0,
    )
    check(config, plain, kind)


@pytest.mark.long
def test_a_gguf_target_says_what_its_dequantised_weights_say(tmp_path: Path) -> None:
    folder, plain = save_gguf(make_model("llama", tmp_path / "source"), tmp_path, kinds_of_q4)
    noised = make_noised(plain, tmp_path / "noised", 0.02)
    drafter, _ = save_gguf(noised, tmp_path / "drafter", lambda _: "Q8_0")
    config = PairConfig(
        target=str(folder / "model.gguf"),  # as llama.cpp is given it
        drafter=str(drafter),
        dtype="float32",
        drafter_dtype="float32",
        simulate_target_ms=8.0,
    )
    check(config, plain, "gguf")


@pytest.mark.long
def test_files_of_every_format_say_what_their_dequantised_weights_say(tmp_path: Path) -> None:
    source = make_model("llama", tmp_path / "source")
    for kind, of_drafter in (
        ("pack-zeros", "modelopt-row"),  # codes stay in 4 bits
        ("nvfp4", "compressed-block"),  # codes become 8 bits
        ("fp8-block", "pack-8"),
    ):
        target, plain = save_packed(source, tmp_path / kind, RECIPES[kind])
        drafter, _ = save_packed(plain, tmp_path / f"{kind} drafter", RECIPES[of_drafter])
        config = PairConfig(
            target=str(target),
            drafter=str(drafter),
            dtype="float32",
            drafter_dtype="float32",
            simulate_target_ms=8.0,
        )
        # Weights of 8-bit floats are a coarse copy of those of 4 bits.
        check(config, plain, kind, seeded=SEEDED, least=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int4", "int8"])
def test_a_target_rounded_at_load_says_what_its_rounded_weights_say(
    method: str, tmp_path: Path
) -> None:
    source = make_model("llama", tmp_path / "source")
    model = load_model(str(source), dtype="float32", quantization=method).model
    tensors = load_file(source / "model.safetensors")
    for name, part in model.named_modules():
        if isinstance(part, QuantisedLinear):
            tensors[f"{name}.weight"] = part.matrix.dequantised()
    plain = tmp_path / "plain"
    shutil.copytree(source, plain)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    config = PairConfig(
        target=str(source),
        drafter=str(make_noised(plain, tmp_path / "noised", 0.02)),
        quantization=method,
        drafter_quantization="int8",
        dtype="float32",
        drafter_dtype="float32",
        simulate_target_ms=8.0,
    )
    check(config, plain, method)


def kinds_of_q4(name: str) -> str:
    """Types of 4, 5 and 8 bits, of which query, key and value are no one matrix."""
    return {"v_proj": "Q8_0", "down_proj": "Q5_0", "embed_tokens": "F16"}.get(
        name.split(".")[-2], "Q4_0"
    )


def check(
    config: PairConfig,
    plain: Path,
    kind: str,
    *,
    seeded: SamplingParams | None = None,
    least: float = 0.5,
) -> None:
    """Check that a pair says what the plain model says, and that drafts are accepted.

    seeded  also with these, it must say what the plain model says with them; None: no matter
    least   share of the drafts that are accepted one by one
    """
    reference = Reference(plain)
    want = reference.greedy(PROMPT, GREEDY.max_tokens)
    num_ties = 0
    with Pair(config) as pair:
        for speculation in (SpeculationConfig(policy="ar"), ONE_BY_ONE, SpeculationConfig()):
            got = generate(pair, PROMPT, speculation, GREEDY)
            what = f"{kind} {speculation.policy}"
            num_ties += not assert_same_but_for_near_ties(reference, PROMPT, want, got.tokens, what)
            assert (got.metrics.num_accepted_tokens > 0) == speculation.drafts
            if speculation is ONE_BY_ONE:
                # Of a model that is not the same hardly any would be right.
                assert got.metrics.acceptance_rate > least, f"{kind}: {got.metrics}"
                assert got.metrics.num_accepted_tokens >= 5  # on a busy machine drafts come late
        sampled = None if seeded is None else generate(pair, PROMPT, SpeculationConfig(), seeded)
    assert num_ties <= 1
    if seeded is not None and sampled is not None:
        alone = PairConfig(target=str(plain), drafter="ngram", dtype="float32")
        with Pair(alone) as pair:
            want = generate(pair, PROMPT, SpeculationConfig(policy="ar"), seeded).tokens
        assert sampled.tokens == want
