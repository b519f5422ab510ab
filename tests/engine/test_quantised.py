"""Quantised checkpoints give what transformers gives for the weights that they stand for."""

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import transformers as hf
import transformers.integrations.accelerate
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from engine.checkpoint.checked import check_checkpoint
from engine.checkpoint.model import load_model
from engine.loading import make_executor
from engine.quantised import awq, gptq, nf4, packed_checkpoint
from engine.quantised.formats import Awq, Format, Fp8, Gptq, Nf4
from engine.quantised.kernels import why_no_kernels
from engine.quantised.packed import Tensors, unpack
from engine.tensor_parallel.split import Cut
from tests import packed_models
from tests.engine.conftest import Folder
from tests.packed_models import RECIPES, save_packed
from tests.tiny_models import make_config

IDS = torch.randint(0, 199, (1, 40), generator=torch.Generator().manual_seed(3))
ACCELERATE = "transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available"
KINDS = ("gptq-act-order", "awq", "fp8-block", "compressed-channel", "nf4-double", "nvfp4", "pack")


def logits_of(model: Any) -> torch.Tensor:
    """What a model says of a fixed text."""
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS).logits
    return logits


def plainly(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model as transformers alone reads it."""
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("kind", RECIPES)
def test_a_quantised_model_is_the_model_of_the_weights_that_it_stands_for(
    kind: str, folder: Folder, tmp_path: Path
) -> None:
    packed, plain = save_packed(folder("llama"), tmp_path, RECIPES[kind])
    loaded = load_model(str(packed))
    want = plainly(plain)
    assert torch.equal(logits_of(loaded.model), logits_of(want))
    assert loaded.num_parameters == sum(weight.numel() for weight in want.parameters())
    assert loaded.dtype == loaded.model.dtype == torch.float32
    assert loaded.max_model_len == 1024
    assert loaded.eos_token_ids == (2,)
    # What was rounded is not what it was.
    assert not torch.equal(logits_of(want), logits_of(plainly(folder("llama"))))


def test_dequantised_weights_need_no_other_package_to_be_put_onto_a_device(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, plain = save_packed(folder("llama"), tmp_path, RECIPES["awq"])
    want = logits_of(plainly(plain))
    asks: Any = transformers.integrations.accelerate
    monkeypatch.setattr(asks, "is_accelerate_available", lambda *_: False)
    onto = {"device_map": {"": torch.device("cpu")}}  # as for a GPU
    monkeypatch.setattr("engine.checkpoint.model.straight_onto", lambda _: onto)
    assert torch.equal(logits_of(load_model(str(packed)).model), want)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_forward_takes_a_quantised_model_as_any_other(
    kind: str, folder: Folder, tmp_path: Path
) -> None:
    packed, plain = save_packed(folder("qwen2"), tmp_path, RECIPES[kind], num_files=3)
    loaded = load_model(str(packed), dtype="bfloat16")
    assert torch.equal(logits_of(loaded.model), logits_of(plainly(plain, torch.bfloat16)))
    assert loaded.dtype == torch.bfloat16
    assert make_executor(load_model(str(packed)), 128).backend == "fused"


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_not_quantised_stay_as_they_are(
    kind: str, folder: Folder, tmp_path: Path
) -> None:
    source = folder("qwen3")
    left = ("lm_head", "layers.1.", "k_proj")
    packed, plain = save_packed(source, tmp_path, RECIPES[kind], plainly=left)
    model = load_model(str(packed)).model
    assert torch.equal(logits_of(model), logits_of(plainly(plain)))
    original = plainly(source)
    for name, weight in model.named_parameters():
        is_packed = name.endswith("_proj.weight") and not any(part in name for part in left)
        assert torch.equal(weight, original.get_parameter(name)) != is_packed, name


def test_experts_and_a_head_may_be_quantised(folder: Folder, tmp_path: Path) -> None:
    for number, kind in enumerate(("gptq", "fp8-block")):
        source, out = folder("qwen3_moe"), tmp_path / str(number)
        packed, plain = save_packed(source, out, RECIPES[kind], plainly=("lm_head", "mlp.gate."))
        assert any(".experts.3." in name for name in load_file(packed / "model.safetensors"))
        assert torch.equal(logits_of(load_model(str(packed)).model), logits_of(plainly(plain)))
    packed, plain = save_packed(folder("llama"), tmp_path, RECIPES["fp8-block"], plainly=())
    assert load_file(packed / "model.safetensors")["lm_head.weight"].itemsize == 1
    assert torch.equal(logits_of(load_model(str(packed)).model), logits_of(plainly(plain)))


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    config = make_config("llama")
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    packed, plain = save_packed(tmp_path / "source", tmp_path, RECIPES["nf4"])
    loaded = load_model(str(packed))
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.num_parameters == sum(weight.numel() for weight in plainly(plain).parameters())
    assert torch.equal(logits_of(loaded.model), logits_of(plainly(plain)))


def test_biases_of_zeros_that_a_model_has_no_place_for_are_left_out(
    folder: Folder, tmp_path: Path
) -> None:
    packed, plain = save_packed(folder("llama"), tmp_path, RECIPES["gptq"])
    change(packed, lambda t: t.update({f"{Q_PROJ}.bias": torch.zeros(64)}))
    assert torch.equal(logits_of(load_model(str(packed)).model), logits_of(plainly(plain)))


def test_transformers_itself_reads_fp8_in_blocks_the_same_way(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It asks for a library that places layers on several devices; here there is one.
    monkeypatch.setattr(ACCELERATE, lambda: True)
    for kind in ("fp8-block", "fp8-tensor"):
        packed, _ = save_packed(folder("llama"), tmp_path / kind, RECIPES[kind])
        model = load_model(str(packed)).model
        assert torch.equal(logits_of(model), logits_of(plainly(packed)))


def test_modelopt_may_say_what_its_files_hold_beside_config_json(
    folder: Folder, tmp_path: Path
) -> None:
    packed, plain = save_packed(folder("llama"), tmp_path, RECIPES["nvfp4"])
    path = packed / "config.json"
    config = json.loads(path.read_text())
    stated = config.pop("quantization_config")
    want = logits_of(plainly(plain))
    # As newer versions write it: all in an object of its own.
    nested = {"quant_method": "modelopt", "quantization": stated}
    path.write_text(json.dumps(config | {"quantization_config": nested}))
    assert torch.equal(logits_of(load_model(str(packed)).model), want)
    # As older versions write it, beside config.json.
    path.write_text(json.dumps(config))
    beside = packed / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": stated}))
    assert torch.equal(logits_of(load_model(str(packed)).model), want)
    # Plain weights of which only keys and values are quantised elsewhere.
    no_weights = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (plain / "hf_quant_config.json").write_text(json.dumps(no_weights))
    assert torch.equal(logits_of(load_model(str(plain)).model), want)


def test_one_matrix_is_dequantised_at_a_time(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = save_packed(folder("llama"), tmp_path, RECIPES["nf4"])
    running, most, calls, guard = [0], [0], [0], Lock()
    dequantised = packed_checkpoint._weight

    def watched(form: Any, tensors: Tensors) -> torch.Tensor:
        with guard:
            running[0] += 1
            calls[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(1e-3)  # threads that are allowed to overlap do
        weight = dequantised(form, tensors)
        with guard:
            running[0] -= 1
        return weight

    monkeypatch.setattr(packed_checkpoint, "_weight", watched)
    load_model(str(packed))
    assert calls == [21]
    assert most == [1]


@pytest.mark.parametrize("is_part", [False, True])
def test_weights_are_dequantised_where_they_are_to_lie(
    *, is_part: bool, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = save_packed(folder("llama"), tmp_path, RECIPES["gptq"])
    found: list[str] = []

    def watched(_form: Any, tensors: Tensors) -> torch.Tensor:
        found.extend(tensor.device.type for tensor in tensors.values())
        return torch.empty(64, 64, device=tensors["qweight"].device)

    monkeypatch.setattr(packed_checkpoint, "_weight", watched)
    of = check_checkpoint(str(packed), None)
    assert of.packed is not None
    name = f"{Q_PROJ}.weight"
    cuts = {name: Cut(0, (range(32),))} if is_part else None
    there = of.packed.tensors(of.empty, cuts, torch.device("meta"))[name][...]
    assert set(found) == {there.device.type} == {"meta"}
    assert there.shape == ((32, 64) if is_part else (64, 64))
    assert unpack(torch.zeros(2, 8, dtype=torch.int32, device="meta"), 4, 0).device.type == "meta"


@settings(max_examples=40)
@given(
    st.sampled_from([4, 8]),
    st.sampled_from([1, 2, 3, 20]),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
)
def test_integers_come_back_as_they_were_packed(
    bits: int, num_groups: int, eights: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    inputs, outputs, most = 16 * num_groups, 8 * eights, 2**bits
    integers = random.integers(0, most, (inputs, outputs))
    zeros = random.integers(0, most, (num_groups, outputs))
    scales = random.normal(size=(num_groups, outputs)).astype(np.float16)
    groups = random.permutation(np.arange(inputs) // 16)
    pack = packed_models.pack_rows
    for version in (1, 2):
        tensors = {
            "qweight": torch.from_numpy(pack(integers, bits)),
            "qzeros": torch.from_numpy(pack((zeros.T + version - 2) % most, bits).T.copy()),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        form = Gptq(bits, 16, 2 - version)
        sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        assert gptq.weight_shape(form, sizes) == (outputs, inputs)
        want = packed_models.by_integers(integers, zeros, scales, groups)
        assert np.array_equal(gptq.weight(form, tensors).numpy(), want)
    if bits == 4:
        in_order, order = np.arange(inputs) // 16, (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": torch.from_numpy(pack(integers.T, 4, order).T.copy()),
            "qzeros": torch.from_numpy(pack(zeros.T, 4, order).T.copy()),
            "scales": torch.from_numpy(scales),
        }
        sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        assert awq.weight_shape(Awq(16), sizes) == (outputs, inputs)
        want = packed_models.by_integers(integers, zeros, scales, in_order)
        assert np.array_equal(awq.weight(tensors).numpy(), want)


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([2, 8, 64]), st.sampled_from([1, 2]))
def test_weights_of_any_size_come_back_from_their_indices(
    rows: int, columns: int, blocksize: int, times: int
) -> None:
    weight = np.random.default_rng(rows * columns).normal(size=(rows, columns))
    double = times == 2
    tensors, want = packed_models.nf4(weight.astype(np.float32), blocksize, double=double)
    state = nf4.read_state(tensors[nf4.STATE], nested=double)
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert nf4.weight_shape(state, sizes) == (rows, columns)
    assert np.array_equal(nf4.weight(state, tensors).numpy(), want)


# What is refused is in test_quantised_refused.py; these two are used there too.
Q_PROJ = "model.layers.1.self_attn.q_proj"


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Write the weights anew."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("form", "libraries"),
    [
        (Gptq(4, 128, 1), {"gptqmodel", "optimum", "accelerate"}),
        (Awq(128), {"gptqmodel", "accelerate"}),
        (Nf4(), {"bitsandbytes", "accelerate"}),
        (Fp8((), "compressed-tensors"), {"compressed_tensors", "accelerate"}),
    ],
)
def test_kernels_are_used_on_a_gpu_where_their_library_is(
    form: Format, libraries: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, where = torch.device("cuda:0"), "engine.quantised.kernels.find_spec"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(where, lambda name: object() if name in libraries else None)
    assert why_no_kernels(form, gpu) is None
    assert why_no_kernels(form, torch.device("cpu")) == "kernels are for CUDA, and not for cpu"
    monkeypatch.setattr(where, lambda name: object() if name != "accelerate" else None)
    assert why_no_kernels(form, gpu) == "accelerate cannot be imported"


def test_fp8_without_a_library_or_without_units_for_it_is_dequantised_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.quantised.kernels.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    gpu = torch.device("cuda:0")
    why = why_no_kernels(Fp8((), "compressed-tensors"), gpu)
    assert why == "this GPU does not multiply 8-bit floats"
    why = why_no_kernels(Fp8(((128, 128),)), gpu)
    assert why == "its kernels are no part of an installed library"


def test_a_model_is_dequantised_where_its_kernels_fail(
    folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("engine.checkpoint.model.why_no_kernels", lambda form, device: None)
    monkeypatch.setitem(sys.modules, "optimum", None)  # whether it is installed or not
    packed, plain = save_packed(folder("llama"), tmp_path, RECIPES["gptq"])
    with caplog.at_level(logging.INFO):
        loaded = load_model(str(packed))
    assert torch.equal(logits_of(loaded.model), logits_of(plainly(plain)))
    assert "its weights are dequantised: " in caplog.text
    assert "cannot load the weights" in caplog.text


def test_a_model_that_kernels_take_is_not_dequantised(
    folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Transformers reads this one by itself; that stands for kernels where there are none.
    monkeypatch.setattr(ACCELERATE, lambda: True)
    monkeypatch.setattr("engine.checkpoint.model.why_no_kernels", lambda form, device: None)
    monkeypatch.setattr("engine.checkpoint.model.loading_options", lambda name, form, device: {})
    monkeypatch.setattr(
        packed_checkpoint, "_weight", lambda form, tensors: pytest.fail("dequantised")
    )
    packed, plain = save_packed(folder("llama"), tmp_path, RECIPES["fp8-block"])
    loaded = load_model(str(packed))
    assert "its weights stay as they are, and take 0.0 GB" in caplog.text
    assert torch.equal(logits_of(loaded.model), logits_of(plainly(plain)))
    assert loaded.num_parameters == sum(weight.numel() for weight in plainly(plain).parameters())
