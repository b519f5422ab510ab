"""Weights that stay in 8 and 4 bits on GPUs: the kernel, its trial at load, and loading.

The kernel runs in Triton's interpreter (`make kernels`) or on a GPU. Loading runs on a CPU that is
taken for a GPU, with torch's product of the dequantised weight in place of the kernel.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.checkpoint.model import load_model
from engine.loading import make_executor
from engine.quantised import gpu_products
from engine.quantised.linear import QuantisedLinear, is_quantised
from engine.quantised.matrix import QuantisedMatrix, stacked
from tests.engine.conftest import Folder
from tests.engine.test_quantised import logits_of, plainly
from tests.gguf_models import save_gguf
from tests.packed_models import RECIPES, save_packed

CPU = torch.device("cpu")


# -- loading ---------------------------------------------------------------------------------------


def product_of_torch(matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Any:
    """In place of `few_bits_product`."""
    weight = matrix.dequantised()
    return lambda x: F.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU is taken for a GPU with a kernel."""
    monkeypatch.setattr(gpu_products, "DEVICES", ("cpu",))
    monkeypatch.setattr(gpu_products, "few_bits_product", product_of_torch)
    gpu_products.why_not.cache_clear()
    yield
    gpu_products.why_not.cache_clear()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("kind", "bytes_of_weight"),
    [
        *(("fp8-block", 1.13), ("fp8-tensor", 1.07), ("compressed-channel", 1.07)),
        *(("modelopt-mx", 1.13), ("modelopt-block", 1.07), ("nvfp4", 0.7)),
        *(("nvfp4-compressed", 0.7), ("pack-zeros", 0.76), ("gptq", 0.76), ("awq", 0.76)),
        *(("pack-act-order", None), ("nf4", None), ("fp8-block-with-rest", None)),
    ],
)
def test_packed_weights_stay_in_their_bits_on_a_gpu(
    kind: str, bytes_of_weight: float | None, folder: Folder, tmp_path: Path
) -> None:
    packed, plain = save_packed(folder("llama"), tmp_path, RECIPES[kind])
    loaded = load_model(str(packed), dtype="float32", keep_codes=True)
    assert is_quantised(loaded.model) == (bytes_of_weight is not None)
    want = logits_of(plainly(plain))
    torch.testing.assert_close(logits_of(loaded.model), want, rtol=0, atol=1e-4)
    if bytes_of_weight is None:
        return
    kept = [part.matrix for part in loaded.model.modules() if isinstance(part, QuantisedLinear)]
    assert len(kept) == 21
    count = sum(matrix.shape[0] * matrix.shape[1] for matrix in kept)
    assert sum(matrix.nbytes for matrix in kept) <= bytes_of_weight * count
    executor = make_executor(
        loaded, 128, backend="fused"
    )  # it compares with the model's own logits
    assert executor.backend == "fused"


@pytest.mark.usefixtures("gpu")
def test_what_the_kernel_does_not_take_is_dequantised(folder: Folder, tmp_path: Path) -> None:
    packed, plain = save_gguf(folder("llama"), tmp_path, lambda _: "Q8_0")
    loaded = load_model(str(packed), dtype="float32", keep_codes=True)
    assert not is_quantised(loaded.model)
    assert torch.equal(logits_of(loaded.model), logits_of(plainly(plain)))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fault", ["wrong", "not a number", "fails"])
def test_a_kernel_that_is_wrong_or_fails_is_not_used(
    fault: str,
    folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def product(matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Any:
        right = product_of_torch(matrix, bias)
        if fault == "fails":
            raise RuntimeError("no such architecture")
        return lambda x: right(x) * (torch.nan if fault == "not a number" else 1.1)

    monkeypatch.setattr(gpu_products, "few_bits_product", product)
    packed, plain = save_packed(folder("llama"), tmp_path, RECIPES["fp8-block"])
    with caplog.at_level(logging.INFO):
        loaded = load_model(str(packed), dtype="float32", keep_codes=True)
    assert not is_quantised(loaded.model)
    assert torch.equal(logits_of(loaded.model), logits_of(plainly(plain)))
    why = "the kernel does not run here: no such" if fault == "fails" else "weights are wrong here"
    assert why in caplog.text


def test_elsewhere_nothing_is_tried() -> None:
    assert gpu_products.why_not(CPU, torch.float32) == "the kernel is for GPUs, and not for cpu"


def test_floats_are_the_numbers_that_they_stand_for_and_are_stacked() -> None:
    for matrix in gpu_products._samples(CPU):
        assert gpu_products.is_covered(matrix)
        both = stacked([matrix, matrix])
        assert both is not None
        assert torch.equal(both.dequantised(), torch.cat([matrix.dequantised()] * 2))
    pairs = torch.arange(8, dtype=torch.uint8)[None].repeat(1, 2)
    scales = torch.full((1, 2), 2.0).to(torch.float8_e4m3fn)
    units = torch.full((2, 1, 1), 0.5)
    of_floats = QuantisedMatrix(4, pairs, scales, None, units, is_float=True)
    want = [0.0, 0, 0.5, 0, 1, 0, 1.5, 0, 2, 0, 3, 0, 4, 0, 6, 0]
    assert of_floats.dequantised().tolist() == [want * 2]


# -- the kernel ------------------------------------------------------------------------------------

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter: make kernels"
)
ROWS = (1, 2, 5, 16, 17, 31, 32, 33, 130)


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def extremes() -> dict[str, QuantisedMatrix]:
    """A matrix of each form with its largest and smallest numbers, and scales of zero."""
    outputs, inputs = 72, 256
    every = torch.arange(256, dtype=torch.uint8).repeat(outputs, 1)
    finite = torch.where((every & 0x7F) == 0x7F, 0, every)
    scales = some(outputs, inputs // 64).abs()
    scales[0], scales[1, 0], scales[2] = 0.0, 1e-30, 64.0
    small = some(outputs, inputs // 16, seed=1).abs().to(torch.float8_e4m3fn)
    small[0], small[1], small[2] = 0.0, 448.0, 2.0**-9  # the largest and the smallest
    powers = torch.randint(117, 138, (outputs, inputs // 32)).to(torch.uint8)
    units = some(1, outputs, 1, seed=2).repeat(2, 1, 1)
    offsets = some(outputs, inputs // 64, seed=3)
    halves = every[:, ::2].contiguous()
    return {
        "int8": QuantisedMatrix(8, every.view(torch.int8), scales),
        "int8 with offsets": QuantisedMatrix(8, every.view(torch.int8), scales, offsets),
        "int4": QuantisedMatrix(4, halves, scales),
        "int4 with offsets": QuantisedMatrix(4, halves, scales, offsets),
        "e4m3": QuantisedMatrix(8, finite.view(torch.float8_e4m3fn), scales, is_float=True),
        "nvfp4": QuantisedMatrix(4, halves, small, None, units, is_float=True),
        "mxfp4": QuantisedMatrix(4, halves, powers.view(torch.float8_e8m0fnu), is_float=True),
    }


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", extremes())
def test_the_kernel_multiplies_with_every_number_of_a_form(form: str, dtype: torch.dtype) -> None:
    matrix = extremes()[form]
    assert gpu_products.is_covered(matrix)
    bias = some(len(matrix.codes), seed=5).to(dtype)
    product, weight = gpu_products.few_bits_product(matrix, bias), matrix.dequantised()
    rows = (some(max(ROWS), 256, seed=6) / 64).to(dtype)
    whole = product(rows[:32])
    for num_rows in ROWS:
        got = product(rows[:num_rows])
        x = rows[:num_rows].double()
        want = F.linear(x, weight.double(), bias.double())
        size = F.linear(x.abs(), weight.double().abs(), bias.double().abs())  # of what is added up
        assert got.dtype == dtype
        most = 2e-6 if dtype == torch.float32 else 1e-3
        assert ((got.double() - want).abs() <= most * size).all()
        if num_rows <= 32:
            assert torch.equal(got, whole[:num_rows]), "one order of sums for any number of rows"


@interpreted
@pytest.mark.parametrize(("num_inputs", "group"), [(96, 32), (160, 160), (64, 64), (384, 128)])
@pytest.mark.parametrize("num_outputs", [1, 63, 64, 65])
def test_blocks_at_the_edges(num_inputs: int, group: int, num_outputs: int) -> None:
    codes = torch.randint(-128, 128, (num_outputs, num_inputs)).to(torch.int8)
    matrix = QuantisedMatrix(8, codes, some(num_outputs, num_inputs // group))
    assert gpu_products.is_covered(matrix)
    x = some(3, num_inputs, seed=1)
    got = gpu_products.few_bits_product(matrix, None)(x)
    torch.testing.assert_close(got, F.linear(x, matrix.dequantised()), rtol=1e-4, atol=1e-3)


@interpreted
def test_the_trial_at_load_finds_the_kernel_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_products, "DEVICES", ("cpu",))
    gpu_products.why_not.cache_clear()
    for dtype in (torch.float32, torch.float16):
        assert gpu_products.why_not(CPU, dtype) is None
    gpu_products.why_not.cache_clear()
