"""Two kernels in Triton's language: the product of a few rows with a weight [N, K], for GPUs.

    by_dots  up to 32 rows, with the GPU's matrix units
    by_sums  one row, with plain multiplications and additions

Both read the weight once, in blocks. A program of the GPU computes a block of outputs. `split`
programs may share a block of outputs: each multiplies one part of the K inputs and writes a partial
sum. All sums are float32.

Only `few_rows.py` imports this file, and only when a kernel is used: many installations have no
Triton.
"""

import torch
import triton
import triton.language as tl

_NUM_WARPS = 4
_FEWEST_ROWS = 16  # of a product of the matrix units; missing rows count as zeros
MOST_ROWS = 32


def by_dots(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    outputs: int,
    inputs: int,
    stages: int,
    split: int,
) -> torch.Tensor:
    """Return x [n, K] times weight [N, K], plus bias [N]: [n, N], for up to 32 rows.

    With a `split` above 1 the result is float32 [split, n, N]: partial sums, one with the bias.

    outputs, inputs  size of a block of the weight, powers of two from 16 on
    stages  how many blocks are read ahead
    """
    assert len(x) <= MOST_ROWS
    rows = _FEWEST_ROWS if len(x) <= _FEWEST_ROWS else MOST_ROWS
    return _launch(_dots, x, weight, bias, outputs, inputs, stages, split, ROWS=rows)


def by_sums(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    outputs: int,
    inputs: int,
    stages: int,
    split: int,
) -> torch.Tensor:
    """Return what `by_dots` returns, for one row; blocks may have any powers of two as sizes."""
    assert len(x) == 1
    return _launch(_sums, x, weight, bias, outputs, inputs, stages, split)


def _launch(
    kernel: triton.JITFunction,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    outputs: int,
    inputs: int,
    stages: int,
    split: int,
    **sizes: int,
) -> torch.Tensor:
    """Run a kernel for all blocks of outputs and all parts of the inputs; return its result."""
    (num_rows, in_size), out_size = x.shape, len(weight)
    part = triton.cdiv(triton.cdiv(in_size, split), inputs) * inputs
    if split == 1:
        out = x.new_empty(num_rows, out_size)
    else:
        out = x.new_empty(split, num_rows, out_size, dtype=torch.float32)
    kernel[(triton.cdiv(out_size, outputs), split)](
        x.contiguous(),
        weight,
        bias,
        out,
        num_rows,
        out_size,
        in_size,
        part,
        OUTPUTS=outputs,
        INPUTS=inputs,
        STAGES=stages,
        IS_EVEN=part * split == in_size,
        num_warps=_NUM_WARPS,
        **sizes,
    )
    return out


# The arguments of both kernels, in memory without gaps:
#     x [num_rows, in_size], weight [out_size, in_size], bias [out_size] or None,
#     out [split, num_rows, out_size]
#     part     how many inputs belong to a partial sum, a multiple of INPUTS
#     IS_EVEN  True: the parts end where the inputs end, so that no reading needs a mask
# Triton compiles a kernel anew for a number that is 1, unless told not to specialize.


@triton.jit(do_not_specialize=["num_rows"])
def _dots(
    x, weight, bias, out, num_rows, out_size, in_size, part,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    STAGES: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(1)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.arange(0, ROWS)
    # Programs of the last block read the last output's weights again instead of missing ones.
    weights = weight + tl.minimum(o, out_size - 1).to(tl.int64)[:, None] * in_size
    rows = x + r[None, :] * in_size
    is_row = r[None, :] < num_rows
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    first = share * part
    for start in tl.range(first, first + part, INPUTS, num_stages=STAGES):
        i = start + tl.arange(0, INPUTS)
        if IS_EVEN:
            w = tl.load(weights + i[None, :])
            values = tl.load(rows + i[:, None], mask=is_row, other=0.0)
        else:
            w = tl.load(weights + i[None, :], mask=i[None, :] < in_size, other=0.0)
            values = tl.load(rows + i[:, None], mask=is_row & (i[:, None] < in_size), other=0.0)
        total = tl.dot(w, values, total, input_precision="ieee")
    if bias is not None:
        is_first = o < tl.where(share == 0, out_size, 0)
        total += tl.load(bias + o, mask=is_first, other=0.0).to(tl.float32)[:, None]
    at = (share * num_rows + r[None, :]) * out_size + o[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_row & (o[:, None] < out_size))


@triton.jit(do_not_specialize=["num_rows"])
def _sums(
    x, weight, bias, out, num_rows, out_size, in_size, part,  # noqa: ARG001 (as for `_dots`)
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(1)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    weights = weight + tl.minimum(o, out_size - 1).to(tl.int64)[:, None] * in_size
    products = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    first = share * part
    for start in tl.range(first, first + part, INPUTS, num_stages=STAGES):
        i = start + tl.arange(0, INPUTS)
        if IS_EVEN:
            w = tl.load(weights + i[None, :])
            values = tl.load(x + i)
        else:
            w = tl.load(weights + i[None, :], mask=i[None, :] < in_size, other=0.0)
            values = tl.load(x + i, mask=i < in_size, other=0.0)
        products += w.to(tl.float32) * values.to(tl.float32)[None, :]
    total = tl.sum(products, axis=1)
    if bias is not None:
        is_first = o < tl.where(share == 0, out_size, 0)
        total += tl.load(bias + o, mask=is_first, other=0.0).to(tl.float32)
    tl.store(out + share * out_size + o, total.to(out.dtype.element_ty), mask=o < out_size)
