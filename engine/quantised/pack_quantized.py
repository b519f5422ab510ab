"""Weights as integers, packed as compressed-tensors packs them (`pack-quantized`: W4A16, W8A16).

weight_packed      [out, in * bits / 32] int32: inputs one after another from the lowest bits on
weight_scale       [out, groups]
weight_zero_point  [out * bits / 32, groups] int32: outputs likewise; absent: all are the middle
weight_g_idx       [in]: the group of each input, in any order; absent: input // group size
weight_shape       [2]: not needed, for config.json names the sizes

weight = scale * (integer - zero point)
"""

import math

import torch

from engine.quantised.formats import PackQuantized
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

PACKED, SCALES, ZEROS, ORDER = "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"
SHAPE = "weight_shape"
_COLUMNS = 256  # inputs dequantised at a time


def weight_shape(form: PackQuantized, sizes: Sizes) -> tuple[int, int]:
    """Return (out, in) of the weight.

    Raises:
        BadTensors: a tensor is missing, or the tensors do not fit each other.
    """
    num_outputs, packed = matrix(PACKED, sizes)
    num_inputs = packed * 32 // form.bits
    rows, groups = matrix(SCALES, sizes)
    of_sizes = [num_groups(num_inputs, size) for size in form.group_sizes]
    if rows != num_outputs or groups not in of_sizes or num_inputs % groups:
        wanted = " or ".join(f"[{num_outputs}, {count}]" for count in of_sizes)
        raise BadTensors(f"{SCALES} is {list(sizes[SCALES])}, it must be {wanted}")
    if form.has_zeros or ZEROS in sizes:
        must_be(ZEROS, sizes, (-(-num_outputs * form.bits // 32), groups))
    if ORDER in sizes:
        must_be(ORDER, sizes, (num_inputs,))
    return num_outputs, num_inputs


def stretch(form: PackQuantized, sizes: Sizes, dim: int, run: range) -> Stretch[PackQuantized]:
    """Return what to read to dequantise a run of outputs (`dim` 0) or inputs (`dim` 1)."""
    (num_outputs, num_inputs), each = weight_shape(form, sizes), 32 // form.bits
    if dim == 0:
        wide = in_units(run, each if ZEROS in sizes else 1, num_outputs)
        slices = dict.fromkeys((PACKED, SCALES), along(0, wide)) | {ZEROS: along(0, wide, each)}
        return Stretch(slices, run.start - wide.start, form)
    group = num_inputs // sizes[SCALES][1]
    by_group = ORDER not in sizes and group < num_inputs
    wide = in_units(run, math.lcm(each, group) if by_group else each, num_inputs)
    slices = {PACKED: along(1, wide, each), ORDER: along(0, wide)}
    if by_group:
        slices |= dict.fromkeys((SCALES, ZEROS), along(1, wide, group))
    return Stretch(slices, run.start - wide.start, form)


def weight(form: PackQuantized, tensors: Tensors) -> torch.Tensor:
    """Return the weight [out, in] in float32.

    Raises:
        BadTensors: a scale is not finite, or weight_g_idx names a group that does not exist.
    """
    numbers, scales, zeros = _unpacked(form, tensors)
    groups = _groups(tensors, numbers, scales)
    for first in range(0, numbers.shape[1], _COLUMNS):  # scales of all would be as large as these
        of = groups[first : first + _COLUMNS]
        numbers[:, first : first + _COLUMNS].sub_(zeros[:, of]).mul_(scales[:, of])
    return numbers


def codes(form: PackQuantized, tensors: Tensors) -> QuantisedMatrix | None:
    """Return the weight [out, in] as it is stored; None if it can only be dequantised.

    That is so if the inputs of a group are not adjacent (weight_g_idx).

    Raises:
        BadTensors: as `weight`.
    """
    numbers, scales, zeros = _unpacked(form, tensors)
    adjacent = _groups({}, numbers, scales)
    if not torch.equal(_groups(tensors, numbers, scales), adjacent):
        return None
    return of_integers(form.bits, numbers.t(), scales.t(), zeros.t())


def _unpacked(
    form: PackQuantized, tensors: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers [out, in], scales and zero points [out, groups], all float32."""
    numbers, scales = unpack(tensors[PACKED], form.bits, 1), finite(SCALES, tensors)
    if ZEROS not in tensors:
        return numbers, scales, torch.full_like(scales, 1 << (form.bits - 1))
    return numbers, scales, unpack(tensors[ZEROS], form.bits, 0)[: len(numbers)]


def _groups(tensors: Tensors, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the group of each input, int64 [in]. Raises BadTensors if one does not exist."""
    num_inputs = numbers.shape[1]
    return groups_of(ORDER, tensors, num_inputs, num_inputs // scales.shape[1], scales, 1)
