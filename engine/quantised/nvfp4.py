"""Weights in NVFP4: 4-bit floats (e2m1), a scale of 8 bits for 16 inputs, one for the tensor.

    weight, weight_packed   [out, in / 2] uint8: two numbers a byte, the first in the low four bits
    weight_scale            [out, in / 16] float8 (e4m3)
    weight_scale_2          [] or [1]: multiplied with the other scales (modelopt)
    weight_global_scale     the same, but they are divided by it (compressed-tensors)

    weight = number * (weight_scale * scale of the tensor)

Twice a number is a whole number from -12 to 12, so a matrix of 8-bit codes holds such a weight to
the bit (`codes`).
"""

import torch

from engine.quantised.formats import Nvfp4
from engine.quantised.matrix import FLOATS, QuantisedMatrix
from engine.quantised.packed import (
    BadTensors,
    Sizes,
    Stretch,
    Tensors,
    along,
    finite,
    in_units,
    matrix,
    must_be,
)

SCALES = "weight_scale"
GROUP = 16  # numbers that share a scale
# The two numbers of each byte, [256, 2], and twice these.
_PAIRS = torch.stack((FLOATS.repeat(16), FLOATS.repeat_interleave(16)), 1)
_DOUBLED = (2 * _PAIRS).to(torch.int8)


def weight_shape(form: Nvfp4, sizes: Sizes) -> tuple[int, int]:
    """Return (out, in) of the weight.

    Raises:
        BadTensors: a tensor is missing, or the tensors do not fit each other.
    """
    rows, pairs = matrix(form.weight, sizes)
    if 2 * pairs % GROUP:
        raise BadTensors(f"{form.weight} has {pairs} columns of two numbers, no groups of {GROUP}")
    must_be(SCALES, sizes, (rows, 2 * pairs // GROUP))
    if sizes.get(form.of_tensor) != (1,):
        must_be(form.of_tensor, sizes, ())
    return rows, 2 * pairs


def stretch(form: Nvfp4, sizes: Sizes, dim: int, run: range) -> Stretch[Nvfp4]:
    """Return what to read to dequantise a run of outputs (`dim` 0) or inputs (`dim` 1)."""
    if dim == 0:
        return Stretch(dict.fromkeys((form.weight, SCALES), along(0, run)), 0, form)
    wide = in_units(run, GROUP, weight_shape(form, sizes)[1])
    slices = {form.weight: along(1, wide, 2), SCALES: along(1, wide, GROUP)}
    return Stretch(slices, run.start - wide.start, form)


def weight(form: Nvfp4, tensors: Tensors) -> torch.Tensor:
    """Return the weight [out, in] in float32.

    Raises:
        BadTensors: a scale is not finite, or what scales are divided by is 0.
    """
    pairs, scales = tensors[form.weight], _scales(form, tensors)
    numbers = _PAIRS.to(pairs.device)[pairs.int()].view(*scales.shape, GROUP)
    return numbers.mul_(scales[..., None]).flatten(1)


def codes(form: Nvfp4, tensors: Tensors) -> QuantisedMatrix:
    """Return the weight [out, in] in codes of 8 bits. Raises BadTensors as `weight`."""
    doubled = _DOUBLED[tensors[form.weight].int()].flatten(1)
    return QuantisedMatrix(8, doubled, _scales(form, tensors) / 2)


def floats(form: Nvfp4, tensors: Tensors) -> QuantisedMatrix:
    """Return the weight [out, in] in its 4 bits, for GPUs. Raises BadTensors as `weight`."""
    _scales(form, tensors)  # checks them
    of_tensor = tensors[form.of_tensor].float().reshape(1, 1, 1)
    unit = 1 / of_tensor if form.is_divisor else of_tensor
    codes, scales = tensors[form.weight], tensors[SCALES]
    return QuantisedMatrix(4, codes, scales, None, unit.repeat(2, len(codes), 1), is_float=True)


def _scales(form: Nvfp4, tensors: Tensors) -> torch.Tensor:
    """Return the product of both scales, float32 [out, in / 16]. Raises BadTensors."""
    scales, of_tensor = finite(SCALES, tensors), finite(form.of_tensor, tensors).reshape(())
    if form.is_divisor and not of_tensor:
        raise BadTensors(f"{form.of_tensor} is 0")
    found = scales / of_tensor if form.is_divisor else scales * of_tensor
    if not torch.isfinite(found).all():
        raise BadTensors(f"{SCALES} and {form.of_tensor} together are infinite")
    return found
