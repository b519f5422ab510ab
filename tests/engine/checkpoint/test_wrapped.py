"""Of a model of several modalities the language model alone is loaded, and it is the same one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.api.models.folders import find
from engine.checkpoint import families, parts
from engine.checkpoint.model import load_model
from engine.checkpoint.stated_text import stored_text
from engine.errors import ModelError
from engine.heads.target import Target
from engine.loading import make_executor
from tests.engine.tensor_parallel.test_parts import check_parts
from tests.packed_models import RECIPES, save_packed
from tests.wrapped_models import WRAPPERS, flatten, make_wrapped, rename, whole

IDS = torch.randint(0, 180, (1, 40), generator=torch.Generator().manual_seed(3))

OTHERS = ("vis", "audio", "project", "connect", "align", "image_newline")  # parts of their names


def logits_of(model: Any) -> torch.Tensor:
    """What a model says of a fixed text."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


def test_every_wrapper_is_tested() -> None:
    assert WRAPPERS.keys() == families.WRAPPERS.keys()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_language_model_says_what_the_whole_says_of_a_text(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_wrapped(kind, tmp_path)
    find(str(folder), None).check_weights()  # the coordinator
    read: list[str] = []
    tensor = parts.Files.tensor

    def noted(self: parts.Files, file: Path, name: str) -> torch.Tensor:
        read.append(name)
        return tensor(self, file, name)

    monkeypatch.setattr(parts.Files, "tensor", noted)
    loaded = load_model(str(folder), dtype="float32")
    assert torch.equal(logits_of(loaded.model), logits_of(whole(folder)))
    assert not [name for name in read if any(part in name for part in OTHERS)]
    numbers = {id(one): one.numel() for one in loaded.model.parameters()}
    assert loaded.num_parameters == sum(numbers.values())
    make_executor(loaded, 128)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("gemma3", "language_model.model.", "model.language_model."),
        ("llava", "language_model.model.", "model.language_model."),
        ("qwen2_vl", "model.", "model.language_model."),
        ("cohere2_vision", "model.language_model.", "language_model.model."),
        ("qwen3_vl", "model.language_model.", "language_model.model."),
    ],
)
def test_older_and_newer_names_of_tensors_are_read(
    kind: str, before: str, after: str, tmp_path: Path
) -> None:
    folder = make_wrapped(kind, tmp_path)
    want = logits_of(load_model(str(folder)).model)

    def new(name: str) -> str:
        name = name.removeprefix("language_model.") if ".lm_head" in name else name
        return after + name.removeprefix(before) if name.startswith(before) else name

    rename(folder, new)
    assert any(name.startswith(after) for name in load_file(folder / "model.safetensors"))
    assert torch.equal(logits_of(load_model(str(folder)).model), want)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_a_config_without_a_part_for_text_describes_the_language_model(
    kind: str, tmp_path: Path
) -> None:
    folder = make_wrapped(kind, tmp_path)
    want = logits_of(whole(folder))
    flatten(folder)
    find(str(folder), None).check_weights()
    assert torch.equal(logits_of(load_model(str(folder)).model), want)


@pytest.mark.parametrize("is_stated", [True, False])
def test_the_wrapper_says_whether_the_output_matrix_is_the_embeddings(
    *, is_stated: bool, tmp_path: Path
) -> None:
    folder = make_wrapped("mistral3", tmp_path, tie_word_embeddings=is_stated)
    want = logits_of(whole(folder))
    if not is_stated:  # transformers' default is to tie, and would lose a matrix
        stated = json.loads((folder / "config.json").read_text())
        del stated["tie_word_embeddings"], stated["text_config"]["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(stated))
    model = load_model(str(folder)).model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_stated
    assert torch.equal(logits_of(model), want)


def test_a_packed_language_model_is_read_as_well(tmp_path: Path) -> None:
    source = make_wrapped("qwen2_5_vl", tmp_path / "source")
    left = ("lm_head", "visual")
    packed, plain = save_packed(source, tmp_path, RECIPES["awq"], plainly=left)
    want = logits_of(whole(plain))
    assert torch.equal(logits_of(load_model(str(packed)).model), want)
    assert not torch.equal(want, logits_of(whole(source)))
    check_parts(packed)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl_moe"])
def test_ranks_read_their_parts_of_the_language_model(kind: str, tmp_path: Path) -> None:
    check_parts(make_wrapped(kind, tmp_path))


def test_a_head_finds_what_it_shares_with_the_language_model(tmp_path: Path) -> None:
    target = Target(str(make_wrapped("llava", tmp_path)), None)
    model = load_model(str(tmp_path)).model
    assert torch.equal(target.embedding(), model.model.embed_tokens.weight)
    assert torch.equal(target.output().weight, model.lm_head.weight)
    assert torch.equal(target.last_norm(), model.model.norm.weight)


def test_what_the_language_model_lacks_or_has_too_much_is_named(tmp_path: Path) -> None:
    folder = make_wrapped("llava", tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    norm = tensors.pop("language_model.model.norm.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors of this model, model\.norm\.weight"):
        load_model(str(folder))
    tensors["language_model.model.norm.weight"] = norm
    tensors["language_model.model.layers.3.input_layernorm.weight"] = norm.clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"leaves out 1 tensors .* model\.layers\.3"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("max_window_layers", None, "it cannot be used: .*'max_window_layers'"),
        ("num_hidden_layers", 4, r"it cannot be used: `num_hidden_layers` \(4\) must be"),
        ("hidden_size", 96, r"by its sizes \(hidden_size\) lm_head.weight is"),
        ("model_type", "rwkv", ": qwen2_vl has recurrent states"),
    ],
)
def test_a_config_of_the_language_model_that_lies_is_named(
    field: str, value: object, line: str, tmp_path: Path
) -> None:
    folder = make_wrapped("qwen2_vl", tmp_path)
    path = folder / "config.json"
    stated = json.loads(path.read_text())
    stated["text_config"][field] = value
    path.write_text(json.dumps(stated))
    with pytest.raises(ModelError, match=line) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_only_a_prefix_at_the_beginning_of_a_name_counts() -> None:
    names = ["vision.language_model.x", "model.language_model.x", "lm_head.weight", "model.y"]
    assert set(stored_text(names)) == {"model.x", "lm_head.weight"}
