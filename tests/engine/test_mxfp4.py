"""Experts in MXFP4 are those that transformers makes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from coordinator.api.models.folders import find
from engine.checkpoint.checked import check_checkpoint
from engine.checkpoint.model import load_model
from engine.errors import ModelError, OutOfMemory
from engine.loading import make_executor
from engine.quantised import mxfp4
from engine.quantised.formats import Mxfp4
from engine.quantised.packed import BadTensors
from engine.tensor_parallel.split import Cut
from tests.engine.conftest import Folder
from tests.engine.test_quantised import change, logits_of, plainly
from tests.packed_models import save_mxfp4

UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def made(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A packed gpt-oss, and the plain one that it stands for."""
    return save_mxfp4(folder("gpt_oss"), tmp_path_factory.mktemp("mxfp4"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_packed_experts_are_the_experts_that_they_stand_for(
    dtype: str, made: tuple[Path, Path]
) -> None:
    packed, plain = made
    find(str(packed), None).check_weights()  # the coordinator
    loaded = load_model(str(packed), dtype=dtype)
    assert loaded.dtype == getattr(torch, dtype)
    want = plainly(plain, loaded.dtype)
    assert torch.equal(logits_of(loaded.model), logits_of(want))
    for name, weight in want.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), weight), name
    make_executor(loaded, 128)


def test_transformers_reads_the_same(made: tuple[Path, Path]) -> None:
    how = hf.Mxfp4Config(dequantize=True)
    kind: Any = hf.AutoModelForCausalLM
    theirs = kind.from_pretrained(made[0], quantization_config=how, dtype=torch.float32).eval()
    assert torch.equal(logits_of(load_model(str(made[0])).model), logits_of(theirs))


def test_every_number_at_every_scale_is_that_of_transformers() -> None:
    """Also the smallest, which are no normal numbers of bfloat16 any more."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1).repeat(1, 1, 16)
    scales.clamp_(max=127 + 125)  # what is above is infinite, also in transformers
    ours = mxfp4.weight({"blocks": blocks, "scales": scales})
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(ours.float(), theirs)


@pytest.mark.parametrize(
    "cut", [Cut(0, (range(1, 3),)), Cut(1, (range(5, 40),)), Cut(2, (range(64), range(70, 90)))]
)
def test_a_part_is_read_without_the_rest(cut: Cut, made: tuple[Path, Path]) -> None:
    of = check_checkpoint(str(made[0]), None)
    assert of.packed is not None
    part = of.packed.tensors(of.empty, {UP: cut})[UP][...]
    assert torch.equal(part.float(), cut.of(load_file(made[1] / "model.safetensors")[UP]))


def test_the_memory_that_is_asked_for_is_that_of_dequantised_weights(
    made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, plain = made
    size = 4 * sum(weight.numel() for weight in plainly(plain).parameters())
    monkeypatch.setattr("engine.checkpoint.model.free_bytes", lambda _: size - 1)
    with pytest.raises(OutOfMemory, match=r"its weights take .* in float32"):
        load_model(str(packed), dtype="float32")
    monkeypatch.setattr("engine.checkpoint.model.free_bytes", lambda _: size)
    load_model(str(packed), dtype="float32")


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda t: t.pop(f"{UP}_scales"), "scales is missing; get the checkpoint again"),
        (lambda t: t.pop(f"{UP}_blocks"), "blocks is missing; get the checkpoint again"),
        (
            lambda t: t.update({f"{UP}_scales": t[f"{UP}_scales"][:, 1:].contiguous()}),
            r"scales is \[8, 255, 2\], it must be \[8, 256, 2\]",
        ),
        (lambda t: t[f"{UP}_scales"].fill_(255), "scales holds NaN or infinity"),
        (
            lambda t: t.update({f"{UP}_blocks": t[f"{UP}_blocks"].float()}),
            f"{UP}_blocks is F32, it must be U8",
        ),
    ],
    ids=["no-scales", "no-blocks", "odd-shape", "nan", "odd-type"],
)
def test_tensors_that_are_missing_or_wrong_are_named(
    spoil: Any, line: str, made: tuple[Path, Path], tmp_path: Path
) -> None:
    for path in made[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    change(tmp_path, spoil)
    with pytest.raises(ModelError, match=line) as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_odd_block_is_refused() -> None:
    with pytest.raises(BadTensors, match=r"blocks is \[1, 2, 3\], it must be"):
        mxfp4.weight_shape({"blocks": (1, 2, 3), "scales": (1, 2)})
    with pytest.raises(BadTensors, match=r"blocks is \[1, 2, 3, 8\], it must be"):
        mxfp4.weight_shape({"blocks": (1, 2, 3, 8), "scales": (1, 2, 3)})
    sizes = {"blocks": (1, 2, 3, 16), "scales": (1, 2, 3)}
    assert mxfp4.weight_shape(sizes) == (1, 96, 2)
    assert mxfp4.stretch(Mxfp4(), sizes, 1, range(40, 50)).start == 8
