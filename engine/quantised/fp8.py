"""Weights of 8-bit floating point: each is multiplied by the scale of its block.

    weight                          [out, in] float8
    weight_scale_inv, weight_scale  [], [1], [out], [out, 1], [blocks of rows, of columns], or
                                    [blocks of rows, 1, of columns, 1] (modelopt)

Both names mean the same scale: the number that the weight was divided by before it was rounded.
"""

import torch

from engine.quantised.formats import Fp8
from engine.quantised.matrix import QuantisedMatrix
from engine.quantised.packed import (
    BadTensors,
    Sizes,
    Stretch,
    Tensors,
    along,
    finite,
    in_units,
    matrix,
)

SCALES = ("weight_scale_inv", "weight_scale")


def weight_shape(form: Fp8, sizes: Sizes) -> tuple[int, int]:
    """Return (out, in) of the weight.

    Raises:
        BadTensors: the shapes of weight and scales do not fit together.
    """
    shape = matrix("weight", sizes)
    _block(form, shape, _scale_name(sizes), sizes)
    return shape


def stretch(form: Fp8, sizes: Sizes, dim: int, run: range) -> Stretch[Fp8]:
    """Return what to read to dequantise a run of outputs (`dim` 0) or inputs (`dim` 1)."""
    shape, name = matrix("weight", sizes), _scale_name(sizes)
    if len(sizes[name]) <= dim or sizes[name][dim] == 1:  # one scale for all along `dim`
        return Stretch({"weight": along(dim, run)}, 0, form)
    block = _block(form, shape, name, sizes)[dim]
    wide = in_units(run, block, shape[dim])
    place = 2 * dim if len(sizes[name]) == 4 else dim
    slices = {"weight": along(dim, wide), name: along(place, wide, block)}
    return Stretch(slices, run.start - wide.start, form)


def weight(form: Fp8, tensors: Tensors) -> torch.Tensor:
    """Return the weight [out, in] in float32.

    Raises:
        BadTensors: a scale is not finite.
    """
    numbers = tensors["weight"].float()
    name = _scale_name({part: tuple(tensor.shape) for part, tensor in tensors.items()})
    scales = tensors[name]
    if scales.dtype == torch.uint8:  # the scales are stored as exponents only
        scales = scales.view(torch.float8_e8m0fnu)
    if scales.dim() == 4:
        scales = scales[:, 0, :, 0]
    sizes = {name: tuple(scales.shape)}
    rows, columns = _block(form, (numbers.shape[0], numbers.shape[1]), name, sizes)
    grid = finite(name, {name: scales})
    if scales.dim() < 2:
        grid = grid.reshape(-1, 1)
    by_row = grid.repeat_interleave(rows, 0)[: len(numbers)]
    whole = numbers.shape[1] // columns
    blocks = numbers[:, : whole * columns].view(len(numbers), whole, columns)
    blocks.mul_(by_row[:, :whole, None])
    numbers[:, whole * columns :].mul_(by_row[:, -1:])
    return numbers


def floats(form: Fp8, tensors: Tensors) -> QuantisedMatrix | None:
    """Return the weight [out, in] in its 8 bits, for GPUs; None: it is not of e4m3.

    Scales of blocks are repeated for each row: 4 bytes for 128 weights.

    Raises:
        BadTensors: a scale or a number is not finite.
    """
    codes, name = tensors["weight"], _scale_name({p: tuple(t.shape) for p, t in tensors.items()})
    if codes.dtype != torch.float8_e4m3fn:
        return None
    if ((codes.view(torch.uint8) & 0x7F) == 0x7F).any():
        raise BadTensors("weight holds NaN or infinity")
    scales = tensors[name]
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    if scales.dim() == 4:
        scales = scales[:, 0, :, 0]
    shape = codes.shape[0], codes.shape[1]
    rows, columns = _block(form, shape, name, {name: tuple(scales.shape)})
    if shape[1] % columns:
        return None
    grid = finite(name, {name: scales})
    grid = grid.reshape(-1, 1) if grid.dim() < 2 else grid
    by_row = grid.repeat_interleave(rows, 0)[: shape[0]].contiguous()
    return QuantisedMatrix(8, codes, by_row, is_float=True)


def _scale_name(sizes: Sizes) -> str:
    """Return the name of the layer's scales. Raises BadTensors unless it has exactly one."""
    names = [name for name in SCALES if name in sizes]
    if len(names) != 1:
        raise BadTensors(f"it has {len(names)} of {' and '.join(SCALES)}, it must have one")
    return names[0]


def _block(form: Fp8, shape: tuple[int, int], name: str, sizes: Sizes) -> tuple[int, int]:
    """Return the (rows, columns) that share a scale, at most the weight's own.

    Raises:
        BadTensors: the scales' shape fits no block of the format.
    """
    scale, (rows, columns) = sizes[name], shape
    if scale in ((), (1,), (1, 1)):
        return rows, columns
    if scale in ((rows,), (rows, 1)):
        return 1, columns
    if len(scale) == 4 and scale[1] == scale[3] == 1:
        scale = scale[0], scale[2]
    for block in form.blocks:
        if scale == (-(-rows // block[0]), -(-columns // block[1])):
            return min(block[0], rows), min(block[1], columns)
    blocks = " or ".join(f"{block[0]}x{block[1]}" for block in form.blocks)
    by = f", a row, or a block of {blocks}" if blocks else " or a row"
    raise BadTensors(f"{name} is {list(scale)}, which is no scale for the tensor{by} of its weight")
