"""Products with quantised matrices on a CPU equal those with the dequantised matrix."""

import math
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from engine import cpu_library, kept
from engine.cpu_library import library, why_not_here
from engine.kept import Kept
from engine.quantised import reading
from engine.quantised.cpu_products import quantised_product, tiled_product
from engine.quantised.matrix import QuantisedMatrix, stacked
from tests.engine.forward import test_cpu_attention

NUM_INPUTS = 512
NUM_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 40)
# Sums of bfloat16 products are in float32 too; only the outputs are rounded.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=draw())


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=draw())


def eight_bits(num_outputs: int, group: int, dtype: torch.dtype) -> QuantisedMatrix:
    codes = integers(-128, 127, num_outputs, NUM_INPUTS).to(torch.int8)
    return QuantisedMatrix(8, codes, numbers(num_outputs, NUM_INPUTS // group).to(dtype))


def four_bits(num_outputs: int, group: int, dtype: torch.dtype) -> QuantisedMatrix:
    codes = integers(0, 255, num_outputs, NUM_INPUTS // 2).to(torch.uint8)
    scales, offsets = numbers(2, num_outputs, NUM_INPUTS // group).to(dtype).unbind()
    return QuantisedMatrix(4, codes, scales, offsets)


def like_q4_k(num_outputs: int) -> QuantisedMatrix:
    scales, offsets = integers(0, 63, 2, num_outputs, NUM_INPUTS // 32).to(torch.uint8).unbind()
    codes = four_bits(num_outputs, 32, torch.float32).codes
    return QuantisedMatrix(4, codes, scales, offsets, numbers(2, num_outputs, NUM_INPUTS // 256))


def like_q6_k(num_outputs: int) -> QuantisedMatrix:
    codes = integers(-32, 31, num_outputs, NUM_INPUTS).to(torch.int8)
    scales = integers(-128, 127, num_outputs, NUM_INPUTS // 16).to(torch.int8)
    units = numbers(2, num_outputs, NUM_INPUTS // 256)
    return QuantisedMatrix(8, codes, scales, units=units)


def like_q5_k(num_outputs: int) -> QuantisedMatrix:
    codes = integers(0, 31, num_outputs, NUM_INPUTS).to(torch.int8)
    other = like_q4_k(num_outputs)
    return QuantisedMatrix(8, codes, other.scales, other.offsets, other.units)


KINDS: dict[str, Callable[[int], QuantisedMatrix]] = {
    "a scale for each output": lambda n: eight_bits(n, NUM_INPUTS, torch.float32),
    "Q8_0": lambda n: eight_bits(n, 32, torch.float16),
    "Q6_K": like_q6_k,
    "Q4_K": like_q4_k,
    "Q4_0": lambda n: replace(four_bits(n, 32, torch.float16), offsets=None),
    "Q5_K": like_q5_k,
    "groups of 128": lambda n: four_bits(n, 128, torch.float32),
    "groups of 32, float16": lambda n: four_bits(n, 32, torch.float16),
}


def relative_error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).abs().max() / want.abs().max())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def skip_without_a_library() -> None:
    if (why := why_not_here()) is not None:
        pytest.skip(why)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_with_the_dequantised_matrix(
    kind: str, dtype: torch.dtype, num_threads: int
) -> None:
    skip_without_a_library()
    torch.set_num_threads(num_threads)
    for num_outputs in (16, 100, 257):
        matrix, bias = KINDS[kind](num_outputs), numbers(num_outputs)
        weight = matrix.dequantised().double()
        product = quantised_product(matrix, bias, dtype)
        assert product is not None
        for num_rows in NUM_ROWS:
            x = numbers(num_rows, NUM_INPUTS).to(dtype)
            found = product(x)
            assert (found.dtype, found.shape) == (dtype, (num_rows, num_outputs))
            want = F.linear(x.double(), weight, bias.double())
            assert relative_error(found, want) < TOLERANCES[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_products_err_as_rounding_their_outputs_does(kind: str) -> None:
    # Inputs of very different sizes: eight bits for each group of them would not do, nor fourteen.
    skip_without_a_library()
    matrix = KINDS[kind](257)
    product = quantised_product(matrix, None, torch.bfloat16)
    assert product is not None
    x = (
        numbers(5, NUM_INPUTS) * torch.logspace(-3, 0, NUM_INPUTS)[integers(0, 511, NUM_INPUTS)]
    ).bfloat16()
    want = F.linear(x.double(), matrix.dequantised().double())
    error, least = (one - want for one in (product(x), want.bfloat16()))
    assert error.norm() < 1.01 * least.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_spoils_its_own_row_alone(kind: str) -> None:
    skip_without_a_library()
    matrix = KINDS[kind](100)
    for dtype in TOLERANCES:
        product = quantised_product(matrix, None, dtype)
        assert product is not None
        x = numbers(4, NUM_INPUTS).to(dtype)
        want = product(x)
        x[1, 3], x[2, 7] = torch.nan, torch.inf
        x[3] = 0
        found = product(x)
        assert torch.equal(found[0], want[0])
        assert not found[1:3].isfinite().any()
        assert not found[3].any()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_bits_whatever_other_rows_there_are(
    kind: str, dtype: torch.dtype
) -> None:
    skip_without_a_library()
    product = quantised_product(KINDS[kind](100), None, dtype)
    assert product is not None
    x = numbers(17, NUM_INPUTS).to(dtype)
    rows = [product(x[i : i + 1])[0] for i in range(len(x))]
    for num_rows in range(1, len(x) + 1):
        assert torch.equal(product(x[:num_rows]), torch.stack(rows[:num_rows]))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_that_are_read_one_by_one_give_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    skip_without_a_library()
    found = library()
    assert found is not None
    product = quantised_product(KINDS[kind](261), None, dtype)  # 17 tiles: no whole number of eight
    assert product is not None
    inputs = [numbers(num_rows, NUM_INPUTS).to(dtype) for num_rows in NUM_ROWS]
    made = []
    for is_one_by_one in (False, True):
        found.slipstream_read_tiles(is_one_by_one)
        made.append(list(map(product, inputs)))
    assert all(map(torch.equal, *made))


def test_how_tiles_are_read_is_timed_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_a_library()
    timed = Mock(return_value=reading.ONE_BY_ONE)
    monkeypatch.setattr(reading, "_quickest", timed)
    monkeypatch.setattr(kept, "QUIET", math.inf)  # also beside other tests
    anew = Kept(is_anew=True)
    for table in (anew, anew, Kept()):
        reading.choose_reading(table)
    assert timed.call_count == 1
    assert reading.reading() == reading.ONE_BY_ONE
    assert reading.is_reading(reading.TOGETHER)
    assert not reading.is_reading(3)


def test_the_quickest_way_of_reading_is_one_of_both() -> None:
    skip_without_a_library()
    found = library()
    assert found is not None
    assert reading.is_reading(reading._quickest(found))


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_matrices_have_the_outputs_of_all(kind: str) -> None:
    parts = [KINDS[kind](n) for n in (32, 16, 48)]
    whole = stacked(parts)
    assert whole is not None
    want = torch.cat([part.dequantised() for part in parts])
    assert torch.equal(whole.dequantised(), want)


@pytest.mark.parametrize("num_outputs", [16, 100, 257])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_plain_matrix_may_lie_in_tiles_too(dtype: torch.dtype, num_outputs: int) -> None:
    skip_without_a_library()
    assert library() is not None
    weight, bias = numbers(num_outputs, NUM_INPUTS).to(dtype), numbers(num_outputs).to(dtype)
    product = tiled_product(weight, bias)
    assert product is not None
    x = numbers(max(NUM_ROWS), NUM_INPUTS).to(dtype)
    rows = product(x)
    want = F.linear(x.double(), weight.double(), bias.double())
    assert relative_error(rows, want) < TOLERANCES[dtype]
    for num_rows in NUM_ROWS:
        assert torch.equal(product(x[:num_rows]), rows[:num_rows])


def test_matrices_of_different_kinds_are_not_stacked() -> None:
    matrices = [make(32) for make in KINDS.values()]
    for i, one in enumerate(matrices):
        assert all(stacked([one, other]) is None for other in matrices[i + 1 :])


def test_what_the_kernel_cannot_do_is_left_to_others() -> None:
    odd = QuantisedMatrix(8, torch.zeros(16, 6, dtype=torch.int8), torch.ones(16, 1))
    assert quantised_product(odd, None, torch.float32) is None
    usual = eight_bits(16, 32, torch.float32)
    assert quantised_product(usual, None, torch.float16) is None
    assert quantised_product(usual, None, torch.float64) is None


@pytest.fixture
def _nothing_is_loaded() -> Iterator[None]:
    cpu_library.forget()
    yield
    cpu_library.forget()


@pytest.mark.usefixtures("_nothing_is_loaded")
def test_without_a_compiler_it_is_said_once_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_library, "cpu_flags", lambda: cpu_library.NEEDED)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    for _ in range(2):
        assert quantised_product(eight_bits(16, 32, torch.float32), None, torch.float32) is None
    assert caplog.messages == [
        "quantised weights are dequantised: there is no C++ compiler (g++, clang++, c++); "
        "install one"
    ]


@pytest.mark.usefixtures("_nothing_is_loaded")
def test_a_processor_without_the_instructions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "cpu_flags", lambda: {"avx2", "avx512f"})
    assert why_not_here() == "this processor has no avx512bw, avx512vl"


@pytest.mark.usefixtures("_nothing_is_loaded")
def test_a_compiler_that_is_named_and_not_there_is_named_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_library, "cpu_flags", lambda: cpu_library.NEEDED)
    monkeypatch.setenv("CXX", "no-such-compiler")
    why = "CXX names 'no-such-compiler', which is not there; name a C++ compiler"
    assert why_not_here() == why


@pytest.mark.usefixtures("_nothing_is_loaded")
def test_a_compiler_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_library, "cpu_flags", lambda: cpu_library.NEEDED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo no room >&2; exit 1; }\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    assert library() is None
    assert "our C++ cannot be compiled (no room); name another compiler" in caplog.text
    assert not list(tmp_path.rglob("*.so"))


def test_a_node_that_compiles_no_pass_keeps_the_library_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "of this start"))
    folder = cpu_library._folder()
    assert folder == tmp_path / "slipstream" / "products"
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write to"):
        cpu_library._folder()


@pytest.mark.usefixtures("_nothing_is_loaded")
def test_a_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    skip_without_a_library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int slipstream_product() { return 0; }\n')
    monkeypatch.setattr(cpu_library, "SOURCES", (source,))
    assert library(compiles=False) is None
    assert tiled_product(torch.zeros(16, 16).bfloat16(), None) is None
    cpu_library.forget()
    assert library() is not None
    cpu_library.forget()
    ran = Mock(wraps=subprocess.run)
    monkeypatch.setattr(subprocess, "run", ran)
    assert library() is not None
    assert [call.args[0][1] for call in ran.call_args_list] == ["--version"]
    assert len(list((tmp_path / "slipstream" / "products").glob("*.so"))) == 1


LESSER = {
    "without AMX": ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"),
    "without products of 8 bits": ("-mno-avx512vnni",),
    "without products of bfloat16": ("-mno-amx-tile", "-mno-avx512bf16"),
}


@pytest.mark.long
@pytest.mark.usefixtures("_nothing_is_loaded")
@pytest.mark.parametrize("options", LESSER.values(), ids=LESSER)
def test_a_processor_with_fewer_instructions_computes_the_same(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    skip_without_a_library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_library, "_OPTIONS", (*cpu_library._OPTIONS, *options))
    for kind in KINDS:
        test_a_product_is_that_with_the_dequantised_matrix(kind, torch.bfloat16, 2)
        test_bfloat16_products_err_as_rounding_their_outputs_does(kind)
        test_what_is_no_number_spoils_its_own_row_alone(kind)
        test_a_row_is_the_same_bits_whatever_other_rows_there_are(kind, torch.bfloat16)
    test_a_plain_matrix_may_lie_in_tiles_too(torch.bfloat16, 100)
    for dim in (48, 64):
        test_cpu_attention.test_attention_is_that_of_its_definition(dim, torch.bfloat16, 7)
    assert len(list((tmp_path / "slipstream" / "products").glob("*.so"))) == 1
