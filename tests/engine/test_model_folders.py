"""Folders that are not what they seem: each is refused in one line that names file and field."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.checkpoint import find_checkpoint
from engine.checkpoint.model import load_model
from engine.errors import ModelError
from engine.loading import fingerprint, make_executor
from tests.engine.conftest import Folder
from tests.families import make_family
from tests.tiny_models import SUPPORTED
from tests.tiny_tokenizer import save_bytewise_tokenizer

Edit = Callable[[Path], object]
HOSTILE: tuple[object, ...] = (0, -1, 10**9, 1e9, "x", None, [], {}, True, 10**30)


@pytest.fixture
def model(folder: Folder, tmp_path: Path) -> Path:
    """A copy of a small model, to be spoilt."""
    return copied(folder("llama"), tmp_path / "model")


def copied(folder: Path, out: Path) -> Path:
    """The same files under other names; what is written anew leaves the original as it is."""
    out.mkdir()
    for path in folder.iterdir():
        os.link(path, out / path.name)
    return out


def write(path: Path, content: object) -> None:
    """Put JSON, or text as it is, in place of a file."""
    path.unlink(missing_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def state(folder: Path, **fields: object) -> None:
    """Write other fields into config.json."""
    path = folder / "config.json"
    write(path, json.loads(path.read_text()) | fields)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Write the weights anew."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def prepared(folder: Path) -> None:
    """What a node does with a folder."""
    fingerprint(str(folder))
    make_executor(load_model(str(folder)), 128)


def refusal(folder: Path) -> str:
    """The one line, without the name of the folder."""
    with pytest.raises(ModelError) as caught:
        prepared(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(folder))
    return text.removeprefix(str(folder)).removeprefix("/")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be a whole number from"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2; it must be a whole number from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but the checkpoint has"),
        ({"num_hidden_layers": 2}, "it leaves out 9 tensors of the checkpoint, model.layers.2."),
        ({"num_hidden_layers": 4}, "the checkpoint lacks 9 tensors of this model, model.layers.3"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, which num_key_value_heads, 3, do"),
        (
            {"hidden_size": 10**9},
            "by its sizes (hidden_size) lm_head.weight is [199, 1000",
        ),
        (
            {"hidden_size": 96, "head_dim": None},
            "by its sizes (hidden_size) lm_head.weight is",
        ),
        ({"vocab_size": 10**9}, "by its sizes (vocab_size) "),
        ({"intermediate_size": "x"}, 'intermediate_size is "x"; it must be a whole number'),
        ({"hidden_act": "loud"}, 'no model can be made of it: hidden_act is "loud" ('),
        (
            {"rope_parameters": {"rope_type": "loud"}},
            'no model can be made of it: rope_type is "loud"',
        ),
        ({"attention_bias": True}, "the checkpoint lacks 12 tensors of this model, model.layers.0"),
        ({"eos_token_id": "x"}, 'eos_token_id is "x"; it must be a token id or a list of them'),
        ({"eos_token_id": list(range(300))}, "eos_token_id names 300 ids; at most 128 can end"),
        ({"quantization_config": 3}, "quantization_config is 3; it must be an object"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_lies_is_named_with_its_field(
    model: Path, fields: dict[str, object], line: str
) -> None:
    state(model, **fields)
    said = refusal(model)
    assert said.startswith(f"config.json: {line}")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "it is empty"),
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ([], "it holds no JSON object but []"),
        (None, "it holds no JSON object but null"),
    ],
    ids=["empty", "torn", "deep", "list", "null"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_holds_no_object_is_named(
    model: Path, name: str, content: object, line: str
) -> None:
    write(model / name, content)
    assert refusal(model).startswith(f"{name}: {line}")


@pytest.mark.parametrize("value", ["x", {}, 1.5, [1, "x"], [[1]], True])
def test_odd_end_of_text_ids_are_refused(model: Path, value: object) -> None:
    write(model / "generation_config.json", {"eos_token_id": value})
    assert refusal(model).startswith("generation_config.json: eos_token_id is ")


def test_what_else_a_generation_config_holds_does_not_matter(model: Path) -> None:
    write(model / "generation_config.json", {"temperature": "x", "eos_token_id": [5, -1]})
    assert load_model(str(model)).eos_token_ids == (5,)


def a_link_to_itself(path: Path) -> None:
    """In place of a file."""
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def a_folder(path: Path) -> None:
    """In place of a file."""
    path.unlink(missing_ok=True)
    path.mkdir()


def a_pipe(path: Path) -> None:
    """In place of a file; to read it would last for ever."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("edit", [a_link_to_itself, a_folder, a_pipe])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
)
def test_what_is_no_file_is_not_opened(model: Path, name: str, edit: Edit) -> None:
    edit(model / name)
    line = refusal(model)
    assert name in line or "safetensors" in line


def index(folder: Path, content: object) -> None:
    """Replace the weights by an index of them."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    write(folder / "model.safetensors.index.json", content)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"metadata": {}, "weight_map": {"a": "model-2.safetensors"}}, "it names model-2."),
        ({"weight_map": {"a": "../model-00001-of-00001.safetensors"}}, "weight_map must name"),
        ({"weight_map": {"a": 3}}, "weight_map must name a file for each tensor"),
        ({"weight_map": []}, "weight_map must name a file for each tensor"),
        ({}, "weight_map must name a file for each tensor"),
        ({"weight_map": {"a": "model-00001-of-00001.safetensors"}}, "metadata must be an object"),
        ([], "it holds no JSON object but []"),
        ("{", "it is no JSON"),
    ],
)
def test_a_broken_index_is_named(model: Path, content: object, line: str) -> None:
    index(model, content)
    assert refusal(model).startswith(f"model.safetensors.index.json: {line}")


def test_a_sound_index_is_followed(model: Path) -> None:
    names = load_file(model / "model.safetensors")
    files = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    index(model, {"metadata": {}, "weight_map": files})
    assert load_model(str(model)).num_layers == 3


def test_weights_under_another_name_are_not_found(model: Path) -> None:
    (model / "model.safetensors").rename(model / "weights.safetensors")
    assert refusal(model).startswith(": it has neither model.safetensors nor")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_number_is_named(model: Path, value: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(model, lambda tensors: tensors[name][3, 4].fill_(value))
    assert f"the weight {name} holds NaN or infinity" in refusal(model)


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.self_attn.q_proj.bias", "model.layers.2.mlp.gate.weight", "lm_head.bias"],
)
def test_a_tensor_that_belongs_to_the_model_is_not_left_out(model: Path, name: str) -> None:
    change_tensors(model, lambda tensors: tensors.update({name: torch.zeros(4)}))
    assert f"it leaves out 1 tensors of the checkpoint, {name} first" in refusal(model)


def test_tensors_that_change_nothing_are_let_pass(model: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "model.layers.0.attention.masked_bias": torch.zeros(1),
        "vision_tower.layers.0.weight": torch.zeros(4, 4),
        "score.weight": torch.zeros(2, 64),
    }
    change_tensors(model, lambda tensors: tensors.update(extra))
    make_executor(load_model(str(model)), 128)
    assert load_model(str(model)).num_layers == 3


def test_a_copy_of_a_tied_head_is_let_pass(model: Path) -> None:
    state(model, tie_word_embeddings=True)
    change_tensors(
        model,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    assert load_model(str(model)).vocab_size == 199


def test_an_adapter_alone_is_said_to_be_one(model: Path) -> None:
    for path in model.iterdir():
        path.unlink()
    write(model / "adapter_config.json", {"base_model_name_or_path": "someone/something"})
    assert refusal(model).startswith("adapter_config.json: the folder holds an adapter")


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(model: Path) -> None:
    save_bytewise_tokenizer(model)
    with pytest.raises(ModelError) as caught:
        fingerprint(str(model)).check_fits(load_model(str(model)).vocab_size)
    assert str(caught.value).startswith(f"{model}/tokenizer.json: it has 256 tokens, but the model")
    fingerprint(str(model)).check_fits(256)  # a token that was added may lie beyond the logits


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": 3}', "\x00"])
def test_a_broken_tokenizer_is_named(model: Path, content: str) -> None:
    write(model / "tokenizer.json", content)
    assert refusal(model).startswith("tokenizer.json: cannot be read: ")


def mutations(folder: Path, fields: list[str] | None = None) -> list[tuple[str, object]]:
    """Every field of a config with every hostile value."""
    names = fields or list(json.loads((folder / "config.json").read_text()))
    return [(name, value) for name in names for value in HOSTILE]


def survives(folder: Path, out: Path, changes: list[tuple[str, object]]) -> int:
    """Load a model under every change; each is harmless, as many as are returned, or refused."""
    num_running = 0
    for name, value in changes:
        shutil.rmtree(out, ignore_errors=True)
        state(copied(folder, out), **{name: value})
        try:
            make_executor(load_model(str(out)), 128)
            num_running += 1
        except ModelError as error:
            line = str(error)
            assert "\n" not in line, (name, value)
            assert line.startswith(str(out)), (name, value, line)
    return num_running


def test_hostile_values_are_refused_or_harmless(folder: Folder, tmp_path: Path) -> None:
    fields = ["num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size", "head_dim"]
    fields += ["eos_token_id", "rope_parameters", "hidden_act", "model_type", "dtype"]
    changes = mutations(folder("llama"), fields)
    assert 0 < survives(folder("llama"), tmp_path / "m", changes) < len(changes) / 2


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_every_field_of_every_architecture_may_be_hostile(
    architecture: str, folder: Folder, tmp_path: Path
) -> None:
    changes: list[Any] = mutations(folder(architecture))
    assert 0 < survives(folder(architecture), tmp_path / "m", changes) < len(changes)


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json in"):
        find_checkpoint(str(tmp_path), None)


def test_a_size_that_shows_only_when_experts_are_put_together_is_named(
    folder: Folder, tmp_path: Path
) -> None:
    model = copied(folder("qwen3_moe"), tmp_path / "model")
    state(model, moe_intermediate_size=32)
    assert refusal(model).startswith("config.json: by its sizes model.layers.0.mlp.experts.")


@pytest.mark.parametrize("kind", ["int8", "int64", "bool", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "name", ["model.layers.1.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_a_norm_or_matrix_of_a_type_that_nothing_expects_is_refused(
    model: Path, name: str, kind: str
) -> None:
    path = model / "model.safetensors"
    change_tensors(model, lambda t: t.update({name: t[name].to(getattr(torch, kind))}))
    with pytest.raises(ModelError) as caught:
        load_model(str(model))
    assert str(caught.value).startswith(f"{path}: {name} holds numbers of type ")
    assert str(caught.value).endswith(
        "and they must be float32, bfloat16 or float16; get a checkpoint with plain weights"
    )


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("head_dim", 17, "head_dim is 17; it must be even"),
        ("rms_norm_eps", -1e-6, "rms_norm_eps is -1e-06; it must be a number from 0 to 0.1"),
        ("rms_norm_eps", "x", 'rms_norm_eps is "x"; it must be a number from 0 to 0.1'),
        ("rope_theta", 0, "rope_theta is 0; it must be a number from 1 to 1e+12"),
        ("rope_parameters", {"rope_theta": "x"}, 'rope_theta is "x"; it must be a number'),
        (
            "tie_word_embeddings",
            3,
            "it cannot be used: Field 'tie_word_embeddings' expected bool, got int (value: 3)",
        ),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_its_name(
    model: Path, field: str, value: object, line: str
) -> None:
    state(model, **{field: value})
    with pytest.raises(ModelError) as caught:
        load_model(str(model))
    assert str(caught.value).startswith(f"{model / 'config.json'}: {line}")


@pytest.mark.parametrize("widths", [[], [128, 0, 128], [128, True, 128], [[128]]])
def test_widths_of_layers_are_whole_numbers(widths: object, model: Path) -> None:
    state(model, intermediate_size=widths)
    assert refusal(model).startswith("config.json: intermediate_size is ")


def test_a_width_for_each_layer_is_taken(tmp_path: Path) -> None:
    make_family("gemma3n_text-shared", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["intermediate_size"] == [128] * 4
    assert load_model(str(tmp_path)).num_layers == 4


def test_a_family_without_widths_for_layers_says_so(model: Path) -> None:
    state(model, intermediate_size=[128, 128, 128])
    assert "intermediate_size" in refusal(model)
