"""Folders of heads that cannot be used: refused before a process is started, by what they hold."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.api.config import PairConfig
from coordinator.api.models.nodes import node_configs
from coordinator.api.models.preflight import Preflight
from proto.errors import SlipstreamError
from tests.engine.heads.checkpoints import LAYOUTS, checkpoint
from tests.packed_models import RECIPES, save_packed
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The heads' target."""
    return make_model("llama", tmp_path_factory.mktemp("target"), scale=1.1)


def look(target: Path, head: Path) -> None:
    """As before a pair is started."""
    config = PairConfig(target=str(target), drafter=str(head))
    config.check_heads()
    Preflight(node_configs(config, endpoint="", outside="", secret="", drafts=True))


def refusal(target: Path, head: Path) -> str:
    """The one line, without the names of the folders."""
    with pytest.raises(SlipstreamError) as caught:
        look(target, head)
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(f"{head}/", "").replace(str(head), "HEAD")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_that_fits_is_let_pass(layout: str, target: Path, tmp_path: Path) -> None:
    folder = checkpoint(layout).save(tmp_path)
    look(target, folder)
    assert (folder / "config.json").exists()


@pytest.mark.parametrize("recipe", ["fp8-block", "pack"])
def test_a_quantised_head_is_let_pass(recipe: str, target: Path, tmp_path: Path) -> None:
    source = checkpoint("speculators eagle3").save(tmp_path / "source")
    packed, _ = save_packed(source, tmp_path, RECIPES[recipe])
    look(target, packed)


def test_a_head_in_fp8_whose_config_states_none_is_refused(target: Path, tmp_path: Path) -> None:
    source = checkpoint("eagle3").save(tmp_path / "source")
    packed, _ = save_packed(source, tmp_path, RECIPES["fp8-block"])
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    assert "holds numbers of type F8_E4M3, and they must be" in refusal(target, packed)


@pytest.mark.parametrize(
    ("layout", "fields", "line"),
    [
        ("eagle", {"head_dim": 17}, "config.json: head_dim is 17; it must be even"),
        ("eagle", {"num_attention_heads": 0}, "config.json: num_attention_heads is 0; it must"),
        ("eagle", {"rms_norm_eps": "x"}, 'config.json: rms_norm_eps is "x"; it must be a number'),
        ("eagle3", {"rope_theta": -1}, "config.json: rope_theta is -1; it must be a number"),
        ("eagle3", {"rope_scaling": {"rope_type": "?"}}, "config.json: its rotary embedding"),
        ("eagle3", {"hidden_act": "gelu"}, 'config.json: hidden_act is "gelu"; only heads'),
        ("eagle3", {"draft_vocab_size": "many"}, "config.json: draft_vocab_size is "),
        ("medusa", {"medusa_num_layers": -1}, "config.json: medusa_num_layers is -1; it must be"),
    ],
)
def test_a_number_out_of_its_range_is_refused(
    layout: str, fields: dict[str, Any], line: str, target: Path, tmp_path: Path
) -> None:
    saved = checkpoint(layout)
    (replace(saved, config={**saved.config, **fields})).save(tmp_path)
    assert refusal(target, tmp_path).startswith(line)


@pytest.mark.parametrize("layout", ["eagle", "eagle3", "speculators eagle"])
def test_an_eagle_head_without_its_first_matrix_is_told_what_it_lacks(
    layout: str, target: Path, tmp_path: Path
) -> None:
    saved = checkpoint(layout)
    files = {name: tensor for name, tensor in saved.files.items() if "fc." not in name}
    replace(saved, files=files).save(tmp_path)
    assert refusal(target, tmp_path).startswith("HEAD: it lacks the tensor fc.weight, the first")


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8", "bool", "complex64"])
@pytest.mark.parametrize("layout", ["medusa", "eagle3"])
def test_a_tensor_of_a_type_that_nothing_expects_is_refused(
    layout: str, kind: str, target: Path, tmp_path: Path
) -> None:
    saved = checkpoint(layout)
    name = "1.0.linear.bias" if layout == "medusa" else "norm.weight"
    files = {**saved.files, name: saved.files[name].to(getattr(torch, kind))}
    replace(saved, files=files).save(tmp_path)
    assert refusal(target, tmp_path).startswith(f"{saved.file}: {name} holds numbers of type ")


def test_a_target_with_a_norm_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_model("llama", tmp_path / "model", scale=1.1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].long()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = PairConfig(target=str(folder), drafter="ngram")
    with pytest.raises(SlipstreamError, match=r"model.norm.weight holds numbers of type I64, and"):
        Preflight(node_configs(config, endpoint="", outside="", secret="", drafts=True))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
