"""The fused backend against the reference, on random sessions and on models of every kind."""

from collections.abc import Iterator
from pathlib import Path as Folder
from typing import Any

import pytest
import torch
import transformers as hf

import engine.forward.fused
from engine.checkpoint.families import FUSED
from engine.checkpoint.model import LoadedModel, load_model
from engine.device import cpu_is_fast_in
from engine.errors import ModelError
from engine.layout.attention_windows import AttentionWindow
from engine.layout.slots import Feed, Move, SlotMap
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from engine.selfcheck import check_reproducible
from tests.engine.random_session import Drawn, Path, RandomSession
from tests.engine.test_slot_cache import difference
from tests.tiny_models import make_config, make_model

# Largest difference of a logit, relative to the largest logit of its row. Half precision keeps 8 or
# 11 bits at every step, and the two backends do not round at the same ones. The matrices are drawn
# half as wide as elsewhere: the wide ones enlarge the rounding errors of both to 1e-5.
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}

ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "linear": {"rope_type": "linear", "factor": 2.0},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 32},
} | {name: {"rope_parameters": rope | {"rope_theta": 1e4}} for name, rope in ROPES.items()}


# Fields of the configuration by which layers from the second on have a window.
UPPER: dict[str, dict[str, Any]] = {
    "mistral": {},  # its layers all have it
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None},
}


def save(architecture: str, folder: Folder, options: dict[str, Any], seed: int = 0) -> Folder:
    """Save a random model with `options` in its configuration."""
    config = make_config(architecture)
    config = type(config)(**config.to_diff_dict() | options)
    torch.manual_seed(seed)
    model: Any = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            spread = 0.3 if weight.dim() == 1 else min(weight.shape) ** -0.5
            weight.add_(torch.randn(weight.shape) * spread)
    model.float().save_pretrained(folder)
    return folder


def pair(
    folder: Folder, dtype: str, num_slots: int, **kwargs: Any
) -> tuple[ModelExecutor, ModelExecutor]:
    """The reference, and the fused backend with weights of its own."""
    reference = make_executor(load_model(str(folder), dtype=dtype), num_slots, backend="reference")
    fused = make_executor(load_model(str(folder), dtype=dtype), num_slots, backend="auto", **kwargs)
    assert (reference.backend, fused.backend) == ("reference", "fused")
    return reference, fused


def session_differences(
    reference: ModelExecutor,
    fused: ModelExecutor,
    seed: int,
    num_rounds: int = 30,
    max_rows: int = 6,
) -> Iterator[float]:
    """Run a random session on both: trees, roll-backs, scattered commits, shorter texts."""
    slots: SlotMap[Path] = SlotMap(fused.capacity, windows=fused.windows)
    session = RandomSession(seed, slots, vocab=199, prompt_len=100, max_rows=max_rows)
    num_moves = 0
    for step in session.steps(num_rounds):
        if isinstance(step, Move):
            num_moves += 1
            for executor in (reference, fused):
                executor.move(step)
        else:
            assert isinstance(step, Drawn)
            ask = range(len(step.paths))
            yield difference(fused.run(step.feed, ask), reference.run(step.feed, ask))
    assert num_moves


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("architecture", FUSED)
def test_sessions_get_the_logits_of_the_reference(
    architecture: str, dtype: str, tmp_path: Folder
) -> None:
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic")
    for seed in range(2):
        folder = make_model(architecture, tmp_path / str(seed), seed, scale=0.5)
        reference, fused = pair(folder, dtype, 320)
        for error in session_differences(reference, fused, seed):
            assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_a_family_is_covered(option: str, tmp_path: Folder) -> None:
    folder = save("llama", tmp_path, OPTIONS[option])
    for error in session_differences(*pair(folder, "float32", 320), seed=4):
        assert error < TOLERANCES["float32"]


@pytest.mark.parametrize("architecture", ["mistral", "qwen3"])
def test_windows_have_the_logits_of_the_reference(architecture: str, tmp_path: Folder) -> None:
    """In all layers, and in upper ones; shorter than a tree is deep, and longer than a block."""
    for seed, size in ((0, 3), (1, 70)):
        flags = {"sliding_window": size, **UPPER[architecture]}
        folder = save(architecture, tmp_path / str(seed), flags)
        reference, fused = pair(folder, "float32", 320)
        assert fused.windows == (AttentionWindow(size),)
        for error in session_differences(reference, fused, seed, max_rows=20):
            assert error < TOLERANCES["float32"]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_random_norms_and_biases_are_not_mixed_up(architecture: str, tmp_path: Folder) -> None:
    folder = save(architecture, tmp_path, {"num_key_value_heads": 1}, seed=1)
    for error in session_differences(*pair(folder, "float32", 320), seed=5, max_rows=12):
        assert error < TOLERANCES["float32"]


def test_a_long_prompt_in_one_pass_and_rows_that_nobody_asks_for(tmp_path: Folder) -> None:
    reference, fused = pair(make_model("llama", tmp_path, scale=0.5), "float32", 1000)
    where = tuple(range(900))
    chunk = Feed(tuple(i * i % 199 for i in where), where, where, 0, None)
    assert fused.run(chunk, ()).shape == (0, 199)
    assert difference(fused.run(chunk, (899, 3)), reference.run(chunk, (899, 3))) < 1e-5
    tree = Feed((5, 6), (900, 900), (907, 901), 900, (1 << 7, 1 << 1))
    assert difference(fused.run(tree, (1, 0)), reference.run(tree, (1, 0))) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", FUSED)
@pytest.mark.parametrize("num_rows", [1, 5, 8])
def test_a_row_of_a_reproducible_pass_has_the_same_bits_anywhere(
    num_rows: int, architecture: str, dtype: str, tmp_path: Folder
) -> None:
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic")
    loaded = load_model(str(make_model(architecture, tmp_path)), dtype=dtype)
    executor = make_executor(loaded, 200, fixed_rows=num_rows)
    assert executor.backend == "fused"
    check_reproducible(executor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_however_a_text_is_cut_into_reproducible_passes_its_bits_are_the_same(
    dtype: str, tmp_path: Folder
) -> None:
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic")
    loaded = load_model(str(make_model("qwen3", tmp_path)), dtype=dtype)
    executor = make_executor(loaded, 200, fixed_rows=8)
    executor.set_total(200)
    text = [i * i % 199 for i in range(60)]

    def logits(num_rows: int) -> torch.Tensor:
        slots: SlotMap[int] = SlotMap(200)
        executor.run(slots.feed_prefix(text[:20]), ())
        rows = []
        while missing := text[slots.prefix_len :][:num_rows]:
            rows.append(executor.run(slots.feed(missing), range(len(missing))))
        return torch.cat(rows)

    one_by_one = logits(1)
    for num_rows in (2, 3, 7, 8):
        assert torch.equal(logits(num_rows), one_by_one)


def test_a_model_that_is_not_covered_runs_on_the_reference(tmp_path: Folder) -> None:
    folder = make_model("gpt2", tmp_path)
    assert make_executor(load_model(str(folder)), 128).backend == "reference"
    with pytest.raises(ModelError, match="the fused engine has no forward for gpt2"):
        make_executor(load_model(str(folder)), 128, backend="fused")


def test_a_fused_forward_that_errs_is_found_before_it_takes_the_weights(
    tmp_path: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = engine.forward.fused.rotations

    def wrong(model: Any, num_positions: int, loaded: LoadedModel) -> torch.Tensor:
        return right(model, num_positions, loaded).abs()

    monkeypatch.setattr(engine.forward.fused, "rotations", wrong)
    loaded = load_model(str(make_model("llama", tmp_path)))
    assert make_executor(loaded, 128, backend="auto").backend == "reference"
    with pytest.raises(ModelError, match="llama gives other logits"):
        make_executor(loaded, 128, backend="fused")


@pytest.mark.parametrize("tied", [1, 0])
def test_the_models_matrices_are_gone_when_they_have_been_laid_out_anew(
    tied: int, tmp_path: Folder
) -> None:
    loaded = load_model(str(save("llama", tmp_path, {"tie_word_embeddings": bool(tied)})))
    model = loaded.model
    embeddings = 199 * 64
    make_executor(loaded, 128)
    left = sum(weight.numel() for weight in model.parameters())
    norms = 7 * 64
    of_one_part = 3 * (64 * 64 + 64 * 128) + embeddings * (not tied)
    assert embeddings + norms <= left <= embeddings + norms + of_one_part
    for layer in model.model.layers:
        assert not layer.self_attn.q_proj.weight.numel()
        assert not layer.mlp.up_proj.weight.numel()
