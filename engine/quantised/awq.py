"""Weights as AWQ stores them (Lin et al. 2023; the `gemm` layout of AutoAWQ), always of 4 bits.

    qweight  [in, out / 8] int32: outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight from the lowest bits on
    qzeros   [groups, out / 8] int32: likewise
    scales   [groups, out]

    weight = scale * (integer - zero)

A zero point is stored as it is, and the inputs of a group are adjacent.
"""

import torch

from engine.quantised.formats import Awq
from engine.quantised.matrix import QuantisedMatrix, of_integers
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
    num_groups,
    unpack,
)

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def weight_shape(form: Awq, sizes: Sizes) -> tuple[int, int]:
    """Return (out, in) of the weight.

    Raises:
        BadTensors: the tensors do not fit each other.
    """
    num_inputs, packed = matrix("qweight", sizes)
    groups = num_groups(num_inputs, form.group_size)
    if num_inputs % groups or (form.group_size != -1 and num_inputs % form.group_size):
        raise BadTensors(f"qweight has {num_inputs} rows, no whole groups of {form.group_size}")
    must_be("scales", sizes, (groups, packed * 8))
    must_be("qzeros", sizes, (groups, packed))
    return packed * 8, num_inputs


def stretch(form: Awq, sizes: Sizes, dim: int, run: range) -> Stretch[Awq]:
    """Return what to read to dequantise a run of outputs (`dim` 0) or inputs (`dim` 1)."""
    num_outputs, num_inputs = weight_shape(form, sizes)
    if dim == 0:
        wide = in_units(run, 8, num_outputs)
        slices = dict.fromkeys(("qweight", "qzeros"), along(1, wide, 8))
        return Stretch(slices | {"scales": along(1, wide)}, run.start - wide.start, form)
    if form.group_size == -1:
        return Stretch({"qweight": along(0, run)}, 0, form)
    wide = in_units(run, form.group_size, num_inputs)
    slices = dict.fromkeys(("qzeros", "scales"), along(0, wide, form.group_size))
    return Stretch(slices | {"qweight": along(0, wide)}, run.start - wide.start, form)


def weight(tensors: Tensors) -> torch.Tensor:
    """Return the weight [out, in] in float32.

    Raises:
        BadTensors: a scale is not finite.
    """
    numbers, scales, zeros = _unpacked(tensors)
    groups = numbers.view(len(scales), -1, numbers.shape[1])
    groups.sub_(zeros[:, None]).mul_(scales[:, None])
    return numbers.t()


def codes(tensors: Tensors) -> QuantisedMatrix:
    """Return the weight [out, in] as it is stored. Raises BadTensors as `weight`."""
    return of_integers(4, *_unpacked(tensors))


def _unpacked(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers [in, out], scales and zero points [groups, out], all float32."""
    numbers = unpack(tensors["qweight"], 4, 1, _ORDER)
    return numbers, finite("scales", tensors), unpack(tensors["qzeros"], 4, 1, _ORDER)
