"""Weights as GPTQ stores them (Frantar et al. 2022; the layout of AutoGPTQ and GPT-QModel).

    qweight  [in * bits / 32, out] int32: inputs one after another from the lowest bits on
    qzeros   [groups, out * bits / 32] int32: outputs likewise
    scales   [groups, out]
    g_idx    [in]: the group of each input, in any order (act-order); absent: input // group_size

    weight = scale * (integer - zero)

The format's first version stores each zero point minus one, and 0 - 1 as the largest integer.
"""

import math

import torch

from engine.quantised.formats import Gptq
from engine.quantised.matrix import QuantisedMatrix, of_integers
from engine.quantised.packed import (
    BadTensors,
    Sizes,
    Stretch,
    Tensors,
    along,
    finite,
    groups_of,
    in_units,
    matrix,
    must_be,
    num_groups,
    unpack,
)

_ROWS = 256  # inputs dequantised at a time


def weight_shape(form: Gptq, sizes: Sizes) -> tuple[int, int]:
    """Return (out, in) of the weight.

    Raises:
        BadTensors: the tensors do not fit each other.
    """
    rows, num_outputs = matrix("qweight", sizes)
    num_inputs = rows * 32 // form.bits
    groups = num_groups(num_inputs, form.group_size)
    if num_outputs * form.bits % 32:
        raise BadTensors(f"qweight has {num_outputs} columns of {form.bits} bits: no whole qzeros")
    must_be("scales", sizes, (groups, num_outputs))
    must_be("qzeros", sizes, (groups, num_outputs * form.bits // 32))
    if "g_idx" in sizes:
        must_be("g_idx", sizes, (num_inputs,))
    return num_outputs, num_inputs


def stretch(form: Gptq, sizes: Sizes, dim: int, run: range) -> Stretch[Gptq]:
    """Return what to read to dequantise a run of outputs (`dim` 0) or inputs (`dim` 1)."""
    num_outputs, num_inputs = weight_shape(form, sizes)
    each = 32 // form.bits  # integers in an element
    if dim == 0:
        wide = in_units(run, each, num_outputs)
        slices = {"qweight": along(1, wide), "qzeros": along(1, wide, each)}
        slices["scales"] = along(1, wide)
        return Stretch(slices, run.start - wide.start, form)
    has_order, group_size = "g_idx" in sizes, form.group_size
    by_group = not has_order and group_size != -1
    unit = math.lcm(each, group_size) if by_group else each
    wide = in_units(run, unit, num_inputs)
    slices = {"qweight": along(0, wide, each)}
    if has_order:
        slices["g_idx"] = along(0, wide)
    elif by_group:
        slices |= dict.fromkeys(("scales", "qzeros"), along(0, wide, group_size))
    return Stretch(slices, run.start - wide.start, form)


def weight(form: Gptq, tensors: Tensors) -> torch.Tensor:
    """Return the weight [out, in] in float32.

    Raises:
        BadTensors: a scale is not finite, or g_idx names a group that does not exist.
    """
    numbers = unpack(tensors["qweight"], form.bits, 0)
    scales, zeros = finite("scales", tensors), _zeros(form, tensors)
    groups = _groups(form, tensors, len(numbers), scales)
    for start in range(0, len(numbers), _ROWS):  # all rows' scales would be as large as the weight
        of = groups[start : start + _ROWS]
        numbers[start : start + _ROWS].sub_(zeros[of]).mul_(scales[of])
    return numbers.t()


def codes(form: Gptq, tensors: Tensors) -> QuantisedMatrix | None:
    """Return the weight [out, in] as it is stored; None if it can only be dequantised.

    That is so if the inputs of a group are not adjacent (act-order).

    Raises:
        BadTensors: as `weight`.
    """
    numbers = unpack(tensors["qweight"], form.bits, 0)
    scales, zeros = finite("scales", tensors), _zeros(form, tensors)
    groups = _groups(form, tensors, len(numbers), scales)
    adjacent = torch.arange(len(numbers), device=groups.device) * len(scales) // len(numbers)
    if len(numbers) % len(scales) or not torch.equal(groups, adjacent):
        return None
    return of_integers(form.bits, numbers, scales, zeros)


def _zeros(form: Gptq, tensors: Tensors) -> torch.Tensor:
    """Return the zero points, float32 [groups, out]."""
    zeros = unpack(tensors["qzeros"], form.bits, 1)
    return zeros.add_(form.zero_is_less).remainder_(1 << form.bits)


def _groups(form: Gptq, tensors: Tensors, num_inputs: int, scales: torch.Tensor) -> torch.Tensor:
    """Return the group of each input, int64 [in]. Raises BadTensors if one does not exist."""
    size = num_inputs if form.group_size == -1 else form.group_size
    return groups_of("g_idx", tensors, num_inputs, size, scales, 0)
