"""Weights that stay in 8 or 4 bits on a CPU stand for the weights that they were made of."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import engine.checkpoint.model
from engine.checkpoint.model import load_model
from engine.errors import ModelError, OutOfMemory
from engine.forward.linears import take, unpacked
from engine.forward.operators import Packer
from engine.loading import load_engine, make_executor
from engine.quantised import awq, gptq, nvfp4, pack_quantized, rounding
from engine.quantised.asked import refuse_rounding
from engine.quantised.formats import Awq, Gptq, Nvfp4, PackQuantized
from engine.quantised.linear import QuantisedLinear, is_quantised
from engine.quantised.matrix import QuantisedMatrix, stacked
from tests import packed_models
from tests.engine.conftest import Folder
from tests.packed_models import RECIPES, save_packed

IDS = torch.randint(0, 199, (1, 40), generator=torch.Generator().manual_seed(3))


def logits_of(model: Any) -> torch.Tensor:
    """What a model says of a fixed text."""
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS).logits
    return logits


def plainly(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model as transformers alone reads it."""
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def some(rows: int, columns: int) -> torch.Tensor:
    """A random weight."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


# -- rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "most", "group"), [(8, 1 / 127, 128), (4, 1 / 8, 64)])
def test_a_rounded_weight_is_as_near_as_its_codes_allow(bits: int, most: float, group: int) -> None:
    weight = some(5000, 1024)  # rounded in several parts
    weight[3] = 0
    matrix = rounding.quantised(weight, bits)
    assert (matrix.bits, matrix.shape, matrix.group) == (bits, (5000, 1024), group)
    assert rounding.quantised(weight[:, :192], bits).group == 64
    assert rounding.quantised(weight[:, :96], bits).group == 32
    groups = weight.view(5000, -1, group)
    error = (matrix.dequantised().view_as(groups) - groups).abs()
    # Half a step to the nearest code; a whole one where the code would be above the last.
    step = groups.abs().amax(-1, keepdim=True) * most * 1.03
    assert (error <= step).all()
    assert ((error <= step / 2).float().mean() > 0.98).all()
    assert not matrix.dequantised()[3].any()
    assert matrix.scales.dtype == torch.float16
    assert matrix.codes.dtype != torch.int8 or matrix.codes.min() >= -127


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_rounded_model_is_the_model_of_its_rounded_weights(
    family: str, method: str, folder: Folder, tmp_path: Path
) -> None:
    source = folder(family)
    kept = load_model(str(source), dtype="float32", quantization=method)
    tensors, layers = load_file(source / "model.safetensors"), 0
    for name, part in kept.model.named_modules():
        if isinstance(part, QuantisedLinear):
            layers += 1
            assert part.matrix.bits == (8 if method == "int8" or name == "lm_head" else 4)
            tensors[f"{name}.weight"] = part.matrix.dequantised()
    assert layers == 22
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    want = logits_of(plainly(tmp_path))
    assert torch.equal(logits_of(kept.model), want)
    assert not torch.equal(want, logits_of(plainly(source)))
    assert make_executor(kept, 128, backend="fused").backend == "fused"


def test_tied_embeddings_stay_and_the_output_matrix_is_rounded() -> None:
    kept = load_model("models/target", dtype="float32", quantization="int4").model
    plain = plainly(Path("models/target"))
    assert torch.equal(kept.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    want = rounding.quantised(plain.lm_head.weight.detach(), 8)
    assert torch.equal(kept.lm_head.matrix.codes, want.codes)


def test_memory_is_asked_for_the_rounded_weights(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(folder("llama")), dtype="float32", quantization="int4").model
    matrices = [part.matrix for part in model.modules() if isinstance(part, QuantisedLinear)]
    taken = sum(
        one.nbytes
        for matrix in matrices
        for one in (matrix.codes, matrix.scales, matrix.offsets)
        if one is not None
    )
    empty = hf.AutoModelForCausalLM.from_config(model.config)
    assert rounding.num_bytes(empty, "int4") == taken
    # Once the matrices are there, there must be room for the embeddings.
    for free, words in (([taken - 1], "in int4, and"), ([taken, 10], "in float32, and")):
        sizes = iter(free)
        monkeypatch.setattr(engine.checkpoint.model, "free_bytes", lambda _, left=sizes: next(left))
        with pytest.raises(OutOfMemory, match=words):
            load_model(str(folder("llama")), dtype="float32", quantization="int4")


def test_weights_that_cannot_be_rounded_are_refused(folder: Folder, tmp_path: Path) -> None:
    llama = str(folder("llama"))
    for name, options, words in (
        (llama, {"quantization": "int2"}, "unknown quantization 'int2': use int8 or int4"),
        (str(folder("gpt2")), {"quantization": "int8"}, "for llama, mistral, qwen2, qwen3, and th"),
    ):
        with pytest.raises(ModelError, match=words):
            load_model(name, **options)
    with pytest.raises(ModelError, match="m: quantization int8 is for CPUs; leave it out, or use"):
        refuse_rounding("m", "int8", device="cuda:0", kind="llama", is_quantised=False)
    packed, _ = save_packed(folder("llama"), tmp_path, RECIPES["gptq"])
    with pytest.raises(ModelError, match="int4 is for plain weights, and these are quantised"):
        load_model(str(packed), quantization="int4")
    tensors = load_file(folder("llama") / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder("llama") / "config.json").read_text())
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or inf"):
        load_model(str(tmp_path), quantization="int8")


def test_other_backends_and_several_processes_are_refused_before_anything_is_loaded() -> None:
    for options, words in (
        ({"backend": "reference"}, "int8 is not for the backend reference; use fused"),
        ({"backend": "graphs"}, "int8 is not for the backend graphs; use fused"),
        ({"device": "cpu:0,cpu:1"}, "int8 is for a model in one process; give it one device"),
    ):
        with pytest.raises(ModelError, match=words):
            load_engine(
                *("no such folder",),
                **{"device": "cpu", "backend": "auto"} | options,  # type: ignore[arg-type]
                revision=None,
                dtype="float32",
                max_len=64,
                fixed_rows=None,
                warm_rows=(1,),
                say=print,
                quantization="int8",
            )


# -- packed checkpoints ----------------------------------------------------------------------------


def test_codes_stand_for_the_weight_that_they_dequantise_to() -> None:
    weight = some(64, 128).numpy()
    for bits, is_symmetric in ((4, False), (4, True), (8, False), (8, True)):
        tensors, _ = packed_models.gptq(weight, bits, sym=is_symmetric)
        form = Gptq(bits, 32, 1)
        matrix = gptq.codes(form, tensors)
        assert matrix is not None
        assert torch.equal(matrix.dequantised(), gptq.weight(form, tensors))
        assert (matrix.offsets is None) == is_symmetric
    tensors, _ = packed_models.gptq(weight, 4, act_order=True)
    assert gptq.codes(Gptq(4, 32, 1), tensors) is None
    tensors, _ = packed_models.awq(weight)
    awq_matrix = awq.codes(tensors)
    assert awq_matrix.group == Awq(32).group_size
    assert torch.equal(awq_matrix.dequantised(), awq.weight(tensors))


def test_packed_integers_and_4_bit_floats_are_codes_to_the_bit() -> None:
    weight = some(64, 128).numpy()
    for bits, is_symmetric in ((4, False), (4, True), (8, False), (8, True)):
        tensors, _ = packed_models.pack_quantized(weight, bits, 32, sym=is_symmetric)
        packed = PackQuantized(bits, (32,), not is_symmetric)
        matrix = pack_quantized.codes(packed, tensors)
        assert matrix is not None
        assert matrix.bits == bits
        assert torch.equal(matrix.dequantised(), pack_quantized.weight(packed, tensors))
    for form in (Nvfp4(), Nvfp4("weight_packed", "weight_global_scale", is_divisor=True)):
        tensors, want = packed_models.nvfp4(weight, compressed=form.is_divisor)
        codes = nvfp4.codes(form, tensors).dequantised()
        assert torch.equal(codes, nvfp4.weight(form, tensors))
        assert torch.equal(codes, torch.from_numpy(want))


@pytest.mark.parametrize(
    "kind",
    ["gptq", "awq", "gptq-act-order", "nf4", "pack-zeros", "pack-act-order", "nvfp4"],
)
def test_a_packed_model_keeps_the_codes_that_there_are(
    kind: str, folder: Folder, tmp_path: Path
) -> None:
    packed, plain = save_packed(folder("qwen2"), tmp_path, RECIPES[kind])
    kept = load_model(str(packed), dtype="bfloat16", keep_codes=True)
    assert is_quantised(kept.model) == (kind in ("gptq", "awq", "pack-zeros", "nvfp4"))
    assert torch.equal(logits_of(kept.model), logits_of(plainly(plain, torch.bfloat16)))
    assert not is_quantised(load_model(str(packed)).model)
    assert make_executor(kept, 128, backend="fused").backend == "fused"


# -- products --------------------------------------------------------------------------------------


def layer(rows: int, bits: int, *, bias: bool = False) -> QuantisedLinear:
    """A quantised layer of 64 inputs."""
    made = QuantisedLinear(rounding.quantised(some(rows, 64), bits), has_bias=bias)
    if made.bias is not None:
        torch.nn.init.normal_(made.bias)
    return made.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_product_of_several_layers_is_that_of_each(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    plain = torch.nn.Linear(64, 8, bias=False, dtype=dtype).requires_grad_(False)
    x = some(3, 64).to(dtype)
    for parts in (
        [layer(16, 4), layer(8, 4, bias=True)],  # one matrix
        [layer(16, 4), layer(8, 8)],  # of several kinds
        [layer(16, 8), plain],
    ):
        for part in parts:
            part.to(dtype)
        want = torch.cat([part(x) for part in parts], dim=1)
        assert torch.equal(unpacked(parts)(x), want)
        got = take(Packer(), parts, dtype, leave=True)(x)
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    # Where there is no kernel, the weights are dequantised, and a line says so.
    assert ("they are dequantised" in caplog.text) == (dtype == torch.float16)


def test_weights_are_freed_once_they_are_packed() -> None:
    part = layer(16, 4)
    codes = weakref.ref(part.matrix.codes)
    take(Packer(), [part, other := layer(8, 4)], torch.float32)
    gc.collect()
    assert codes() is None
    with pytest.raises(AssertionError, match="its weight was freed"):
        other(some(1, 64))


def test_matrices_of_two_kinds_are_not_stacked() -> None:
    eight, four = layer(8, 8).matrix, layer(8, 4).matrix
    assert stacked([eight, four]) is None
    both = stacked([four, four])
    assert isinstance(both, QuantisedMatrix)
    assert torch.equal(both.dequantised(), torch.cat([four.dequantised()] * 2))
