"""Our kernels in Triton's language are compiled for a GPU (sm_90), which need not be here.

    make kernels

Triton compiles for GPUs that are not there, and brings the assembler. What it has made says how
many registers a thread has, whether any of its numbers lie in memory for want of registers, and how
wide its loads are. What an interpreter runs may be refused by the compiler, so both are asked.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.forward.few_rows import _DOTS, _SUMS
from engine.forward.masks import MASK_BITS
from engine.forward.split_kernel import _SLOTS

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

MOST_REGISTERS = 255  # of a thread
MOST_SHARED = 227 << 10  # bytes of a thread block on sm_90
ALIGNED = [["tt.divisibility", 16]]
ALIGNED_IN_PRODUCTS = ("x", "weight", "out", "out_size", "in_size", "part")
WIDE_COPY = r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10"  # of 16 bytes
WIDE, NARROW = r"ld\.global(?:\.\w+)*\.v4\.b32", r"ld\.global(?:\.\w+)*\.b(?:8|16) "
COPY = r"cp\.async\.c[ag]\.shared\.global"


@dataclass(frozen=True)
class Made:
    """A compiled kernel: registers of a thread, bytes on its stack and in local memory, text."""

    registers: int
    stack: int
    local: int
    shared: int
    text: str

    def count(self, what: str) -> int:
        """How often an instruction stands there."""
        return len(re.findall(what, self.text))


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: tuple[str, ...],
    folder: Path,
) -> Made:
    """Compile a kernel for sm_90.

    types    of the arguments that are no constants; all others are 32-bit integers
    aligned  arguments that are multiples of 16
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    signature = {name: types.get(name, "i32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): ALIGNED for name in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    program = folder / "kernel.cubin"
    program.write_bytes(made.asm["cubin"])
    tool = next(Path(triton.__file__).parent.rglob("cuobjdump"))
    said = subprocess.run(
        [tool, "--dump-resource-usage", program], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert found is not None, said
    return Made(*map(int, found.groups()), made.metadata.shared, made.asm["ptx"])


def assert_fits(made: Made) -> None:
    assert made.registers <= MOST_REGISTERS
    assert (made.stack, made.local) == (0, 0), "numbers lie in memory for want of registers"
    assert made.shared <= MOST_SHARED
    assert made.count(NARROW) == 0, "a load of less than four bytes"


def constants_of(form: tuple[int, ...]) -> dict[str, Any]:
    """Of a product without a bias, whose parts end where the inputs end."""
    outputs, inputs, stages, _ = form
    sizes = {"OUTPUTS": outputs, "INPUTS": inputs, "STAGES": stages}
    return {**sizes, "IS_EVEN": True, "bias": None}


def types_of(split: int, bias: str | None) -> dict[str, str]:
    """Of a product's arguments, in bfloat16."""
    out = "*fp32" if split > 1 else "*bf16"
    found = {"x": "*bf16", "weight": "*bf16", "out": out}
    return found if bias is None else {**found, "bias": bias}


@pytest.mark.parametrize("num_rows", [16, 32])
@pytest.mark.parametrize("form", _DOTS, ids=str)
def test_products_by_dots(form: tuple[int, ...], num_rows: int, tmp_path: Path) -> None:
    from engine.forward.few_rows_kernels import _dots

    constants = {"ROWS": num_rows, **constants_of(form)}
    made = compiled(_dots, types_of(form[3], None), constants, ALIGNED_IN_PRODUCTS, tmp_path)
    assert_fits(made)
    assert made.count(WIDE_COPY) == made.count(COPY) > 0, "all weights are read 16 bytes at a time"
    assert made.count("mma") > 0, "the matrix units are used"


@pytest.mark.parametrize("is_even", [True, False])
def test_products_with_a_bias_and_of_odd_sizes(tmp_path: Path, *, is_even: bool) -> None:
    from engine.forward.few_rows_kernels import _dots, _sums

    for kernel, sizes in (
        (_dots, {"ROWS": 16, "OUTPUTS": 64, "INPUTS": 128, "STAGES": 3}),
        (_sums, {"OUTPUTS": 4, "INPUTS": 1024, "STAGES": 1}),
    ):
        constants = {**sizes, "IS_EVEN": is_even}
        made = compiled(kernel, types_of(1, "*bf16"), constants, (), tmp_path)
        assert (made.stack, made.local) == (0, 0)


@pytest.mark.parametrize("is_many", [False, True])
@pytest.mark.parametrize(
    ("form", "group", "scales"),
    [(0, 64, "*fp32"), (1, 32, "*fp32"), (2, 128, "*fp32"), (3, 16, "*u8"), (3, 32, "*u8")],
)
def test_products_with_weights_in_few_bits(
    form: int, group: int, scales: str, tmp_path: Path, *, is_many: bool
) -> None:
    from engine.quantised.gpu_kernel import _OUTPUTS, _STAGES, FEW_ROWS, _product, most_rows

    num_rows = most_rows(form, group) if is_many else FEW_ROWS

    codes = "*i8" if form == 0 else "*u8"
    types = {"x": "*bf16", "codes": codes, "scales": scales, "out": "*bf16"}
    sizes = {"FORM": form, "GROUP": group, "ROWS": num_rows, "OUTPUTS": _OUTPUTS}
    sizes |= {"INPUTS": 128 if form == 3 else group, "STAGES": _STAGES}
    constants = {**sizes, "offsets": None, "units": None, "bias": None}
    aligned = ("x", "codes", "scales", "out", "out_size", "in_size")
    made = compiled(_product, types, constants, aligned, tmp_path)
    print(f"form {form}, {num_rows} rows: {made.registers} registers, {made.local} bytes spilt")  # noqa: T201
    assert made.registers <= MOST_REGISTERS
    assert (made.stack, made.local) == (0, 0), "numbers lie in memory for want of registers"
    assert made.shared <= MOST_SHARED
    assert made.count("mma") > 0, "the matrix units are used"


@pytest.mark.parametrize("form", _SUMS, ids=str)
def test_products_by_sums(form: tuple[int, ...], tmp_path: Path) -> None:
    from engine.forward.few_rows_kernels import _sums

    made = compiled(
        _sums, types_of(form[3], None), constants_of(form), ALIGNED_IN_PRODUCTS, tmp_path
    )
    assert_fits(made)
    assert made.count(WIDE) == form[0] + 1, "a row of the weight for each output, and the inputs"


@pytest.mark.parametrize(
    ("group", "dim", "num_queries", "has_window"),
    [
        *((4, 128, 16, 0), (4, 128, 32, 0), (4, 64, 16, 0), (8, 128, 64, 0)),
        *((4, 128, 16, 1), (4, 80, 16, 1)),
    ],
)
def test_attention_split_over_the_keys(
    group: int,
    dim: int,
    num_queries: int,
    has_window: int,
    tmp_path: Path,
) -> None:
    from engine.forward.split_kernel_in_triton import join, part

    sizes = {"GROUP": group, "DIM": dim, "PADDED_DIM": 1 << (dim - 1).bit_length()}
    halves = dict.fromkeys(("queries", "keys", "values"), "*bf16")
    found = dict.fromkeys(("sums", "about"), "*fp32")
    constants = {
        **sizes,
        "QUERIES": num_queries,
        "SLOTS": _SLOTS,
        "BITS": MASK_BITS,
        "HAS_WINDOW": bool(has_window),
        "STAGES": 3,
        "PRECISION": "tf32",
    }
    types = {**halves, **found, "words": "*i64", "first_slots": "*i64", "scale": "fp32"}
    aligned = (*halves, *found, "words", "first_slots", "head_stride")
    made = compiled(part, types, constants, aligned, tmp_path)
    assert (made.stack, made.local) == (0, 0)
    assert made.registers <= MOST_REGISTERS
    assert made.shared <= MOST_SHARED
    if dim == sizes["PADDED_DIM"]:
        assert made.count(WIDE_COPY) == made.count(COPY) > 0, "keys and values, 16 bytes at a time"
    whole = compiled(
        join, {**found, "out": "*bf16"}, {**sizes, "SHARES": 32}, tuple(found), tmp_path
    )
    assert (whole.stack, whole.local) == (0, 0)
