"""What is loaded, and what is refused with one line."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coordinator.api.models.lengths import longest_of
from engine.checkpoint.files import stated_eos_ids
from engine.checkpoint.model import load_model
from engine.device import cpu_is_fast_in, pin, torch_device
from engine.errors import EngineError, ModelError
from engine.model_executor import ModelExecutor
from engine.selfcheck import check_slot_attention
from tests.engine.conftest import Folder, Load
from tests.tiny_models import MIN_DISTINCT, SUPPORTED, make_model, make_noised


def refusal(name: str | Path, device: str = "cpu") -> str:
    """The one line with which a model is refused, at loading or at the check that follows."""
    with pytest.raises(ModelError) as caught:
        check_slot_attention(ModelExecutor(load_model(str(name), device=device), 64))
    assert isinstance(caught.value, EngineError)
    text = str(caught.value)
    assert "\n" not in text
    return text.removeprefix(f"{name}: ")


def edited(folder: Path, out: Path, **changes: object) -> Path:
    """A copy of a model with other entries in config.json (None removes one)."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (out / "config.json").write_text(json.dumps(kept))
    return out


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_what_a_model_says_of_itself(architecture: str, load: Load) -> None:
    loaded = load(architecture)
    assert loaded.architecture == architecture
    assert loaded.vocab_size == 199
    assert loaded.max_model_len == 1024
    assert loaded.eos_token_ids == (2,)
    assert loaded.num_layers == 3
    assert loaded.dtype == torch.float32
    assert loaded.device == torch.device("cpu")
    assert loaded.num_parameters > 100_000
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("rwkv", "rwkv has recurrent states that it keeps outside of transformers' caches"),
        ("bloom", "bloom has ALiBi position biases"),
        ("falcon_alibi", "falcon has ALiBi position biases"),
        ("gpt_neo_global", "gpt_neo has an attention mask of its own, which would hide the tree's"),
        ("t5", "it is an encoder-decoder model; use a decoder-only one"),
    ],
)
def test_architectures_that_cannot_be_rolled_back_are_refused(
    architecture: str, why: str, folder: Folder
) -> None:
    assert refusal(folder(architecture)).startswith(why)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "mistral_window", "qwen2_window"])
def test_texts_of_a_model_with_a_window_may_be_longer_than_the_window(
    architecture: str, folder: Folder
) -> None:
    loaded = load_model(str(folder(architecture)), dtype="float32")
    assert loaded.max_model_len == 1024
    assert longest_of(str(folder(architecture)), None) == 1024


def test_a_model_that_runs_but_attends_otherwise_is_found_out(load: Load) -> None:
    loaded = load("llama")
    executor = ModelExecutor(loaded, 64)
    hook = loaded.model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"attention_mask": None}), with_kwargs=True
    )
    with pytest.raises(ModelError, match="llama gives other logits under a tree mask"):
        check_slot_attention(executor)
    hook.remove()


def test_a_model_that_takes_no_such_mask_is_refused(load: Load) -> None:
    loaded = load("llama")
    executor = ModelExecutor(loaded, 64)

    def no_mask(_module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 4:
            raise ValueError("masks have two dimensions\nand so on")

    hook = loaded.model.model.register_forward_pre_hook(no_mask, with_kwargs=True)
    with pytest.raises(ModelError) as caught:
        check_slot_attention(executor)
    hook.remove()
    assert str(caught.value) == (
        f"{loaded.name}: llama does not take tree masks over a slot cache "
        "(masks have two dimensions); use another architecture"
    )


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/at/all", "a/b/c", "~/nowhere-at-all", "x/"]
)
def test_a_missing_folder_is_not_looked_for_on_the_hub(name: str) -> None:
    assert refusal(name) == "no such folder; give a model's folder or its name on the hub"


def test_a_hub_that_cannot_be_reached_is_said_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refusal("nobody/nothing-of-the-kind") == (
        "no such folder here, and the hub cannot be reached; give a local folder"
    )


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith("no config.json in ")


def test_a_folder_without_safetensors_is_refused(folder: Folder, tmp_path: Path) -> None:
    shutil.copy(folder("llama") / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "only safetensors and GGUF are read" in refusal(tmp_path)


def test_a_broken_config_is_refused(folder: Folder, tmp_path: Path) -> None:
    broken = edited(folder("llama"), tmp_path / "model")
    (broken / "config.json").write_text("{")
    assert refusal(broken).startswith(f"{broken}/config.json: it is no JSON")


def test_an_unknown_architecture_is_refused(folder: Folder, tmp_path: Path) -> None:
    odd = edited(folder("llama"), tmp_path / "model", model_type="never_heard_of")
    assert refusal(odd).startswith(f'{odd}/config.json: model_type is "never_heard_of", of which ')


def test_torn_weights_are_refused(folder: Folder, tmp_path: Path) -> None:
    torn = edited(folder("llama"), tmp_path / "model")
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert refusal(torn).startswith(f"{weights}: cannot be read: ")


def test_missing_tensors_are_refused_instead_of_drawn_at_random(
    folder: Folder, tmp_path: Path
) -> None:
    part = edited(folder("llama"), tmp_path / "model")
    tensors = load_file(part / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    line = refusal(part).removeprefix(f"{part}/config.json: ")
    assert line.startswith("the checkpoint lacks 1 tensors of this model, model.layers.1.mlp.up")


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("gpu", "unknown device 'gpu': use cpu, cpu:N or cpu:N-M (these cores) or cuda:N (GPU N)"),
        ("cuda", "unknown device 'cuda': use cpu, cpu:N or cpu:N-M"),
        ("cpu:-1", "unknown device 'cpu:-1': use cpu, cpu:N or cpu:N-M"),
        ("cpu:0,", "unknown device 'cpu:0,': use cpu, cpu:N or cpu:N-M"),
        ("cpu:1-0", "device cpu:1-0: 1-0 is no range of cores; the lower number first"),
        ("cpu:0-9999", "device cpu:0-9999: no such core; the cores here are cpu:0 to "),
        ("cpu:9999", "device cpu:9999: no such core; the cores here are cpu:0 to "),
    ],
)
def test_unknown_devices_are_refused(device: str, why: str) -> None:
    with pytest.raises(ModelError) as caught:
        torch_device(device)
    assert str(caught.value).startswith(why)
    with pytest.raises(ModelError):
        pin(device)


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"device cuda:0: no usable CUDA GPU here \(.*; use cpu"):
        torch_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ModelError, match="the GPUs here are cuda:0 to cuda:1"):
        torch_device("cuda:2")


def test_pinning_keeps_the_process_to_its_cores() -> None:
    allowed = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    core = max(allowed)
    try:
        pin("cpu")
        assert os.sched_getaffinity(0) == allowed
        pin(f"cpu:{core}")
        assert os.sched_getaffinity(0) == {core}
        assert torch.get_num_threads() == 1
        os.sched_setaffinity(0, allowed)
        low = min(allowed)
        pin(f"cpu:{low}-{low},{core}")
        assert os.sched_getaffinity(0) == {low, core}
        assert torch.get_num_threads() == len({low, core})
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)


def test_auto_is_the_dtype_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = make_model("llama", tmp_path / "half", dtype=torch.bfloat16)
    unsaid = edited(half, tmp_path / "unsaid", dtype=None)
    monkeypatch.setattr("engine.device.cpu_flags", lambda: {"avx512_bf16"})
    assert cpu_is_fast_in(torch.bfloat16)
    assert load_model(str(half)).dtype == torch.bfloat16
    assert load_model(str(unsaid)).dtype == torch.bfloat16
    assert load_model(str(half), dtype="float32").model.dtype == torch.float32
    monkeypatch.setattr("engine.device.cpu_flags", lambda: {"avx2"})
    loaded = load_model(str(half))
    assert loaded.dtype == loaded.model.dtype == torch.float32


def test_an_unknown_dtype_is_refused(folder: Folder) -> None:
    with pytest.raises(ModelError, match="unknown dtype 'int8': use auto, float32, bfloat16"):
        load_model(str(folder("llama")), dtype="int8")


_ABSENT = "absent"
END_CASES: dict[str, tuple[object, object, tuple[int, ...]]] = {
    "one file": (7, "no file", (7,)),
    "several in one file": ([11, 7, 7], "no file", (7, 11)),
    "both, and one of them counts": (7, [9, 11, 100_000, -1], (9, 11)),
    "generation_config.json without any": (7, _ABSENT, ()),
    "generation_config.json with null": (7, None, ()),
    "generation_config.json with an empty list": (7, [], ()),
    "null in config.json": (None, 9, (9,)),
    "nothing anywhere": (_ABSENT, "no file", ()),
    "nothing in either file": (_ABSENT, _ABSENT, ()),
}


@pytest.mark.parametrize(("config", "generation", "want"), END_CASES.values(), ids=END_CASES.keys())
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_tokens_that_end_a_text_are_those_of_transformers(
    folder: Folder,
    tmp_path: Path,
    architecture: str,
    config: object,
    generation: object,
    want: tuple[int, ...],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder(architecture), model)
    stated = json.loads((model / "config.json").read_text())
    stated.pop("eos_token_id", None)
    stated |= {} if config == _ABSENT else {"eos_token_id": config}
    (model / "config.json").write_text(json.dumps(stated))
    (model / "generation_config.json").unlink(missing_ok=True)
    if generation != "no file":
        said = {} if generation == _ABSENT else {"eos_token_id": generation}
        (model / "generation_config.json").write_text(json.dumps(said))
    theirs = AutoModelForCausalLM.from_pretrained(model).generation_config.eos_token_id
    listed = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
    assert {one for one in listed if 0 <= one < 199} == set(want)
    assert load_model(str(model)).eos_token_ids == want


def test_a_language_model_within_another_ends_where_the_outer_file_says(tmp_path: Path) -> None:
    inner = {"text_config": {"eos_token_id": 5}}
    assert stated_eos_ids(tmp_path, {"eos_token_id": 7, **inner}) == (7,)
    assert stated_eos_ids(tmp_path, {"eos_token_id": None, **inner}) == (5,)
    assert stated_eos_ids(tmp_path, inner) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, **inner}))
    assert stated_eos_ids(tmp_path, inner) == (9,)
    (tmp_path / "generation_config.json").write_text(json.dumps(inner))
    assert stated_eos_ids(tmp_path, inner) == ()


def test_long_rotary_embeddings_limit_the_length_to_where_they_begin(
    folder: Folder, tmp_path: Path
) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    rope["original_max_position_embeddings"] = 256
    model = edited(folder("llama"), tmp_path / "model", rope_parameters=rope)
    assert load_model(str(model)).max_model_len == 256


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_small_models_have_something_to_say(architecture: str, load: Load) -> None:
    prompt = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        text = load(architecture).model.generate(
            prompt, max_new_tokens=128, min_new_tokens=128, do_sample=False, pad_token_id=0
        )
    assert len(set(text[0, 3:].tolist())) >= MIN_DISTINCT


def test_a_noised_copy_agrees_with_its_original_now_and_then(
    folder: Folder, load: Load, tmp_path: Path
) -> None:
    noised = load_model(str(make_noised(folder("llama"), tmp_path / "noised", sigma=0.1)))
    ids = torch.randint(0, 199, (1, 400), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = load("llama").model(ids).logits.argmax(-1)
        theirs = noised.model(ids).logits.argmax(-1)
    assert 0.3 < (ours == theirs).float().mean() < 0.95


def test_a_model_with_hardly_any_positions_is_refused(folder: Folder, tmp_path: Path) -> None:
    model = edited(folder("llama"), tmp_path / "m", max_position_embeddings=8)
    assert refusal(model).startswith("it takes 8 tokens (max_position_embeddings)")


def test_a_config_of_other_types_is_refused(folder: Folder, tmp_path: Path) -> None:
    model = edited(folder("llama"), tmp_path / "m", num_hidden_layers="many")
    line = refusal(model)
    assert line.startswith(f'{model}/config.json: num_hidden_layers is "many"; it must be')
