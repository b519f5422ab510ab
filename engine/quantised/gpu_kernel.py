"""A kernel in Triton's language: the product of rows with a weight [N, K] of 8 or 4 bits, for GPUs.

    form          a code stands for                           scales
    INTEGERS_8    a whole number, -128 to 127                 any group of 32 inputs or more
    INTEGERS_4    a whole number, 0 to 15; 8 without offsets  likewise
    FLOATS_8      an 8-bit float (e4m3), without NaN          likewise
    FLOATS_4      a 4-bit float (e2m1)                        e4m3 for 16 inputs, e8m0 for 32

The weight is read once in its bits for up to 32 rows, and once more for each further block of rows.
A code is exact in the type of the rows, products are those of the matrix units, and all sums are
float32. Where a group has 32 inputs or more, its sum is multiplied with the scale, so no weight is
rounded; the product of a 4-bit float with its own scale is exact in bfloat16. Up to 32 rows have
one order of sums, whatever their number: missing rows are computed as zeros.

Only `gpu_products.py` imports this file, and only when a kernel is used: many installations have no
Triton.
"""

import torch
import triton
import triton.language as tl

INTEGERS_8, INTEGERS_4, FLOATS_8, FLOATS_4 = range(4)
_NUM_WARPS, _STAGES, _OUTPUTS = 4, 4, 64
# Rows of a block: few, or as many as fit into registers; by form and group where that is less.
FEW_ROWS, _MANY_ROWS, _FEWER_ROWS = 32, 128, {(FLOATS_4, 16): 64, (FLOATS_4, 32): 32}
_MOST_INPUTS, FEWEST_INPUTS = 128, 32


def most_rows(form: int, group: int) -> int:
    """Return how many rows a block has at most."""
    return _FEWER_ROWS.get((form, group), _MANY_ROWS)


def few_bits(
    x: torch.Tensor,
    form: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    units: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return x [n, K] times a weight [N, K], plus bias [N]: [n, N], of the type of x.

    codes    uint8 or int8 [N, K], or uint8 [N, K / 2] with the earlier input in the lower half
    scales   [N, K / group], float32 or float16; of FLOATS_4 uint8, the bits of e4m3 (groups of 16)
             or of e8m0 (groups of 32)
    offsets  float32 [N, K / group], added to scale times code; None: 0, or -8 scales for INTEGERS_4
    units    float32 [N]: multiplied with the product; None: 1
    """
    num_rows, in_size = x.shape
    out_size, num_groups = scales.shape
    group = in_size // num_groups
    inputs = min(_MOST_INPUTS, group & -group) if form != FLOATS_4 else _MOST_INPUTS
    while in_size % inputs:
        inputs //= 2
    assert inputs >= FEWEST_INPUTS, "a group is smaller than a block"
    rows = FEW_ROWS if num_rows <= FEW_ROWS else most_rows(form, group)
    out = x.new_empty(num_rows, out_size)
    _product[(triton.cdiv(out_size, _OUTPUTS), triton.cdiv(num_rows, rows))](
        x.contiguous(),
        codes,
        scales,
        offsets,
        units,
        bias,
        out,
        num_rows,
        out_size,
        in_size,
        num_groups,
        FORM=form,
        GROUP=group,
        ROWS=rows,
        OUTPUTS=_OUTPUTS,
        INPUTS=inputs,
        STAGES=_STAGES,
        num_warps=_NUM_WARPS,
    )
    return out


@triton.jit
def _e4m3(bits):
    """Return e4m3 numbers divided by 256, in float16, of their bits (uint8)."""
    wide = bits.to(tl.int16)
    return _as_half(((wide & 0x80) << 8) | ((wide & 0x7F) << 7))


@triton.jit
def _as_half(bits):
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _doubled(bits):
    """Return twice the e2m1 numbers of the lower four bits, in int32."""
    code = bits.to(tl.int32)
    exponent = (code >> 1) & 3
    size = tl.where(exponent == 0, code & 1, (2 + (code & 1)) << tl.maximum(exponent - 1, 0))
    return tl.where((code & 8) != 0, -size, size)


@triton.jit
def _scales_of_floats(scales, at, group, GROUP: tl.constexpr):
    """Return half the scales of 4-bit floats, in float32; e4m3's are divided by 256 as well."""
    bits = tl.load(scales + at + group)
    if GROUP == 16:
        return _e4m3(bits).to(tl.float32) * 0.5
    return tl.exp2(bits.to(tl.float32) - 128.0)


# The arguments, in memory without gaps: x [num_rows, in_size], codes, scales [out_size,
# num_groups], offsets like scales or None, units and bias [out_size] or None, out.


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x, codes, scales, offsets, units, bias, out, num_rows, out_size, in_size, num_groups,
    FORM: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Programs of the last block read the last output's weights again instead of missing ones.
    there = tl.minimum(o, out_size - 1).to(tl.int64)
    is_row = r[None, :] < num_rows
    rows = x + r[None, :].to(tl.int64) * in_size
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(0, in_size, INPUTS, num_stages=STAGES):
        if FORM == 1 or FORM == 3:
            pair = start // 2 + tl.arange(0, INPUTS // 2)
            pairs = tl.load(codes + there[:, None] * (in_size // 2) + pair[None, :])
            first = tl.load(rows + 2 * pair[:, None], mask=is_row, other=0.0)
            second = tl.load(rows + 2 * pair[:, None] + 1, mask=is_row, other=0.0)
            if FORM == 3:
                groups = (2 * pair // GROUP)[None, :]
                scale = _scales_of_floats(scales, there[:, None] * num_groups, groups, GROUP)
                even = (_doubled(pairs) * scale).to(first.dtype)
                odd = (_doubled(pairs >> 4) * scale).to(first.dtype)
            else:
                shift = 8 if offsets is None else 0
                even = ((pairs & 15).to(tl.int32) - shift).to(first.dtype)
                odd = ((pairs >> 4).to(tl.int32) - shift).to(first.dtype)
            part = tl.dot(even, first, input_precision="ieee")
            part = tl.dot(odd, second, part, input_precision="ieee")
            sums = tl.sum(first.to(tl.float32), axis=0) + tl.sum(second.to(tl.float32), axis=0)
        else:
            i = start + tl.arange(0, INPUTS)
            values = tl.load(rows + i[:, None], mask=is_row, other=0.0)
            weights = tl.load(codes + there[:, None] * in_size + i[None, :])
            if FORM == 2:
                weights = _e4m3(weights)
            part = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            sums = tl.sum(values.to(tl.float32), axis=0)
        if FORM == 3:
            total += part
        else:
            at = there * num_groups + start // GROUP
            total += part * tl.load(scales + at).to(tl.float32)[:, None]
            if offsets is not None:
                total += tl.load(offsets + at).to(tl.float32)[:, None] * sums[None, :]
    if FORM == 2 or (FORM == 3 and GROUP == 16):
        total *= 256.0  # what `_e4m3` divides by
    if units is not None:
        total *= tl.load(units + there)[:, None]
    if bias is not None:
        total += tl.load(bias + there).to(tl.float32)[:, None]
    place = r[None, :].to(tl.int64) * out_size + o[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_row & (o[:, None] < out_size))
