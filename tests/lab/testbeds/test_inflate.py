"""A checkpoint in a larger shape: the same logits, random numbers wherever they may be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from engine.checkpoint.model import load_model
from engine.loading import make_executor
from lab.testbeds.inflate import (
    DOWN,
    EMBEDDINGS,
    GATE,
    HEAD,
    LAST_NORM,
    LAYERS_PER_SHARD,
    O,
    Q,
    Shape,
    inflate,
    main,
    stored_dtype,
)
from proto.installation import MODELS
from tests.engine.forward.test_fused import save
from tests.engine.test_slot_cache import difference
from tests.tiny_tokenizer import save_bytewise_tokenizer

TOLERANCE = 1e-4
SOURCE = Shape(64, 128, 3, 4, 2, 16)
LARGE = Shape(96, 200, 6, 12, 3, 32)
ONE_DIRECTION = {
    "nothing": {},
    "width": {"hidden_size": 1000},
    "mlp": {"intermediate_size": 129},
    "layers": {"num_layers": 4},
    "heads and their keys": {"num_heads": 16, "num_kv_heads": 8},
    "group": {"num_heads": 8},
    "head_dim": {"head_dim": 48},
}
Tensors = dict[str, torch.Tensor]


def logits_of(folder: Path) -> torch.Tensor:
    """Logits [60, V] of some text, in float32."""
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.arange(60)[None] * 7 % 199).logits
    return logits[0]


def tensors_of(folder: Path) -> Tensors:
    """All of them, by name."""
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with matrices and norms of its own, untied."""
    return save("llama", tmp_path_factory.mktemp("source"), {})


@pytest.fixture(scope="module")
def large(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a larger shape."""
    folder = tmp_path_factory.mktemp("large")
    inflate(source, folder, LARGE)
    return folder


def test_the_logits_stay_as_they_were_in_every_direction_at_once(source: Path, large: Path) -> None:
    want = logits_of(source)
    assert want.std() > 0.5
    assert difference(logits_of(large), want) < TOLERANCE


@pytest.mark.parametrize("direction", ONE_DIRECTION)
def test_the_logits_stay_as_they_were_in_one_direction(
    direction: str, source: Path, tmp_path: Path
) -> None:
    inflate(source, tmp_path, replace(SOURCE, **ONE_DIRECTION[direction]))
    assert difference(logits_of(tmp_path), logits_of(source)) < TOLERANCE


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "source", {"tie_word_embeddings": True})
    inflate(source, tmp_path / "large", LARGE)
    assert difference(logits_of(tmp_path / "large"), logits_of(source)) < TOLERANCE
    assert HEAD not in tensors_of(tmp_path / "large")
    assert json.loads((tmp_path / "large" / "config.json").read_text())["tie_word_embeddings"]


def test_the_shape_is_what_was_asked_for_and_the_rest_is_the_source(
    source: Path, large: Path
) -> None:
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, large))
    changed = {name for name in old | new if old.get(name) != new.get(name)}
    sizes = {"hidden_size", "intermediate_size", "head_dim", "rms_norm_eps"}
    numbers = {"num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    assert changed == sizes | numbers
    assert new["rms_norm_eps"] == pytest.approx(old["rms_norm_eps"] * 64 / 96)
    width, mlp = LARGE.hidden_size, LARGE.intermediate_size
    layers = LARGE.num_layers * (2 * width * (12 + 3) * 32 + 3 * width * mlp + 2 * width)
    count = sum(tensor.numel() for tensor in tensors_of(large).values())
    assert count == layers + 2 * 199 * width + width
    assert len(list(large.glob("*.safetensors"))) == 1 + -(-LARGE.num_layers // LAYERS_PER_SHARD)


def test_what_does_not_contribute_is_random(large: Path) -> None:
    tensors = tensors_of(large)
    for number in range(LARGE.num_layers):
        layer = {
            name.removeprefix(f"model.layers.{number}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{number}.")
        }
        is_old = number < SOURCE.num_layers
        # Rows of real heads that no rotary pair of the source came to, in the old width.
        assert num_zeros(layer[Q]) == (4 * 16 * 64 if is_old else 0)
        assert num_zeros(layer[O]) == 96 * 12 * 32 - (64 * 4 * 16 if is_old else 0)
        assert num_zeros(layer[DOWN]) == 96 * 200 - (64 * 128 if is_old else 0)
        others = [tensor for name, tensor in layer.items() if name not in (Q, O, DOWN)]
        assert [num_zeros(tensor) for tensor in others] == [0] * 6
    assert num_zeros(tensors[EMBEDDINGS]) == 199 * (96 - 64)
    assert num_zeros(tensors[HEAD]) == num_zeros(tensors[LAST_NORM]) == 0
    last = tensors[f"model.layers.{LARGE.num_layers - 1}.{GATE}"]
    assert float(last.std()) == pytest.approx(0.02, rel=0.05)


def num_zeros(tensor: torch.Tensor) -> int:
    return int((tensor == 0).sum())


def test_the_random_numbers_can_be_anything(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.testbeds.inflate.SPREAD", 20.0)
    for seed in (1, 2):
        inflate(source, tmp_path / f"{seed}", LARGE, seed=seed)
        assert difference(logits_of(tmp_path / f"{seed}"), logits_of(source)) < TOLERANCE
    one, two = (tensors_of(tmp_path / f"{seed}")["model.layers.5." + GATE] for seed in (1, 2))
    assert float((one == two).float().mean()) < 0.01


def test_the_engine_runs_the_result_and_the_tokenizer_comes_along(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "source", {"vocab_size": 257, "tie_word_embeddings": True})
    save_bytewise_tokenizer(source)
    inflate(source, tmp_path / "large", LARGE)
    loaded = load_model(str(tmp_path / "large"))
    assert make_executor(loaded, 128, backend="fused").backend == "fused"
    tokenizers = [(folder / "tokenizer.json") for folder in (source, tmp_path / "large")]
    assert tokenizers[0].read_text() == tokenizers[1].read_text()


def test_half_precision_stays_half_precision(source: Path, tmp_path: Path) -> None:
    half: Any = hf.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    inflate(tmp_path / "half", tmp_path / "large", LARGE)
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "large").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "large" / "config.json").read_text())["dtype"] == "bfloat16"
    # Norms and queries are scaled, so they round anew: to 8 bits.
    assert difference(logits_of(tmp_path / "large"), logits_of(tmp_path / "half")) < 0.05


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"hidden_size": 63}, "hidden_size is 63"),
        ({"num_layers": 2}, "num_layers is 2"),
        ({"num_kv_heads": 1}, "num_kv_heads is 1"),
        ({"num_heads": 5}, "no multiple of num_kv_heads"),
        ({"num_heads": 6}, "no multiple of num_heads"),
        ({"num_kv_heads": 4}, "1 query heads per key head"),
        ({"head_dim": 24}, "rotary"),
    ],
)
def test_a_shape_that_is_no_growth_is_refused(
    sizes: dict[str, int], why: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=why):
        inflate(source, tmp_path, replace(SOURCE, **sizes))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "qwen3"}, "qwen3 is not supported"),
        ({"attention_bias": True}, "biases"),
        ({"mlp_bias": True}, "biases"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        ({"num_hidden_layers": 4}, "the weights lack model.layers.3"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_another_kind_of_model_is_refused(
    changes: dict[str, Any], why: str, source: Path, tmp_path: Path
) -> None:
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(ValueError, match=why) as caught:
        inflate(tmp_path, tmp_path / "large", LARGE)
    assert len(str(caught.value).splitlines()) == 1


def test_a_model_that_is_there_is_not_overwritten(source: Path) -> None:
    before = (source / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ValueError, match="there is a model already"):
        inflate(source, source, LARGE)
    assert (source / "model.safetensors").stat().st_mtime_ns == before


def test_the_command_grows_what_it_is_told_to_and_refuses_in_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(source), str(tmp_path / "large"), "--hidden-size", "80"]) == 0
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert (config["hidden_size"], config["intermediate_size"]) == (80, 128)
    capsys.readouterr()
    wrong = ([str(source), "--head-dim", "24"], [str(tmp_path)], [str(source), "--device", "gpu"])
    for first, *rest in wrong:
        assert main([first, str(tmp_path / "other"), *rest]) == 1
        output = capsys.readouterr()
        assert output.out == ""
        assert len(output.err.splitlines()) == 1


def test_the_embedded_models_are_computed_in_float32_and_grow_in_what_they_are_stored_in() -> None:
    for name in ("target", "drafter", "drafter-shallow"):
        assert json.loads((MODELS / name / "config.json").read_text())["dtype"] == "float32"
        assert stored_dtype(MODELS / name) == "bfloat16"
