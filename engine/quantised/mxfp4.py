"""Experts' weights in MXFP4 (OCP Microscaling Formats, version 1.0), as gpt-oss stores them.

    blocks  [experts, out, in / 32, 16] uint8: two numbers a byte, the first in the low four bits
    scales  [experts, out, in / 32] uint8: the exponent of a power of two, plus 127

    weight = scale * number

A number is a sign, two bits of exponent and one of mantissa. The product needs no more than that
and the exponents of bfloat16, which therefore holds each weight exactly.
"""

import torch

from engine.quantised.formats import Mxfp4
from engine.quantised.matrix import FLOATS
from engine.quantised.packed import BadTensors, Sizes, Stretch, Tensors, along, finite, in_units

_TYPE = torch.bfloat16
# The two numbers of each byte [256, 2], as one int32 each: half as many are looked up.
_PAIRS = torch.stack((FLOATS.repeat(16), FLOATS.repeat_interleave(16)), 1)
_PAIRS = _PAIRS.to(_TYPE).view(torch.int32).flatten()
_BLOCK = 32  # numbers that share a scale


def weight_shape(sizes: Sizes) -> tuple[int, int, int]:
    """Return (experts, in, out) of the weight.

    Raises:
        BadTensors: a tensor is missing, or the two do not fit each other.
    """
    for name in ("blocks", "scales"):
        if name not in sizes:
            raise BadTensors(f"{name} is missing")
    blocks, scales = sizes["blocks"], sizes["scales"]
    if len(blocks) != 4 or 0 in blocks or blocks[3] * 2 != _BLOCK:
        raise BadTensors(f"blocks is {list(blocks)}, it must be [experts, out, in / 32, 16]")
    if scales != blocks[:3]:
        raise BadTensors(f"scales is {list(scales)}, it must be {list(blocks[:3])}")
    return blocks[0], blocks[2] * _BLOCK, blocks[1]


def stretch(form: Mxfp4, sizes: Sizes, dim: int, run: range) -> Stretch[Mxfp4]:
    """Return what to read to dequantise a run of experts (`dim` 0), inputs (1) or outputs (2)."""
    if dim == 1:
        wide = in_units(run, _BLOCK, weight_shape(sizes)[1])
        part, start = along(2, wide, _BLOCK), run.start - wide.start
    else:
        part, start = along(0 if dim == 0 else 1, run), 0
    return Stretch(dict.fromkeys(("blocks", "scales"), part), start, form)


def weight(tensors: Tensors) -> torch.Tensor:
    """Return the weight [experts, in, out] in bfloat16, which holds it exactly.

    Raises:
        BadTensors: a scale is NaN.
    """
    blocks = tensors["blocks"]
    scales = finite("scales", {"scales": tensors["scales"].view(torch.float8_e8m0fnu)}).to(_TYPE)
    pairs = _PAIRS.to(blocks.device)
    experts, num_inputs, num_outputs = weight_shape({n: tuple(t.shape) for n, t in tensors.items()})
    shape = experts, num_inputs, num_outputs
    whole = torch.empty(shape, dtype=_TYPE, device=blocks.device)
    for expert in range(experts):  # all at once would take several times the memory
        numbers = pairs[blocks[expert].int()].view(_TYPE)
        numbers.mul_(scales[expert][..., None])
        whole[expert].copy_(numbers.view(num_outputs, num_inputs).t())
    return whole
