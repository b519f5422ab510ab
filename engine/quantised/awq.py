"""Weights as AWQ stores them (Lin et al. 2023; the `gemm` layout of AutoAWQ), always of 4 bits.

    qweight  [in, out / 8] int32: outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight from the lowest bits on
    qzeros   [groups, out / 8] int32: likewise
    scales   [groups, out]

    weight = scale * (integer - zero)

A zero point is stored as it is, and inputs of a group follow each other.
"""

import torch

from engine.quantised.formats import Awq
from engine.quantised.packed import (
    BadTensors,
    Sizes,
    Tensors,
    finite,
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


def weight(tensors: Tensors) -> torch.Tensor:
    """Return the weight [out, in] in float32.

    Raises:
        BadTensors: a scale is not finite.
    """
    numbers = unpack(tensors["qweight"], 4, 1, _ORDER)
    zeros = unpack(tensors["qzeros"], 4, 1, _ORDER)
    scales = finite("scales", tensors)
    groups = numbers.view(len(scales), -1, numbers.shape[1])
    groups.sub_(zeros[:, None]).mul_(scales[:, None])
    return numbers.t()
