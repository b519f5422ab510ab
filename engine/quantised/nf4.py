"""Weights as bitsandbytes stores them in 4 bits (Dettmers et al. 2023, QLoRA).

    weight                                [n / 2, 1] uint8: two indices, the first in the high bits
    weight.quant_map                      [16]: the number that an index stands for
    weight.absmax                         [blocks of n]: scales; uint8 if quantised themselves
    weight.nested_quant_map               [256]: the number that such a uint8 stands for
    weight.nested_absmax                  [blocks of absmax]: scales of the scales
    weight.quant_state.bitsandbytes__nf4  JSON: sizes of weight and blocks, mean of the scales

A block is a run of numbers of the flattened weight and may cross the ends of rows.
"""

import json
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.quantised.packed import (
    BadTensors,
    Sizes,
    Stretch,
    Tensors,
    along,
    finite,
    in_units,
    must_be,
)

STATE = "weight.quant_state.bitsandbytes__nf4"
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_LARGEST = 1 << 31


@dataclass(frozen=True, slots=True)
class State:
    """The parameters that a packed weight stores about itself.

    shape             (out, in) of the weight
    blocksize         number of weights that share a scale
    nested_blocksize  number of scales that share a scale; 0: the scales are not quantised
    nested_offset     number subtracted from the scales before they were quantised
    """

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int
    nested_offset: float


def read_state(content: torch.Tensor, *, nested: bool) -> State:
    """Return the parameters of a weight, read from the JSON in a tensor of bytes.

    content  [length] uint8
    nested   True if the scales are quantised too

    Raises:
        BadTensors: it is not JSON, or lacks a field.
    """
    try:
        fields = json.loads(bytes(content.tolist()))
    except (ValueError, RecursionError) as error:
        raise BadTensors(f"{STATE} is no JSON") from error
    if not isinstance(fields, dict):
        raise BadTensors(f"{STATE} is no object")
    shape = fields.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(_is_count, shape)):
        raise BadTensors(f"{STATE}: shape must be two whole numbers from 1 on")
    names = ("blocksize", "nested_blocksize") if nested else ("blocksize",)
    for name in names:
        if not _is_count(fields.get(name)):
            raise BadTensors(f"{STATE}: {name} must be a whole number from 1 on")
    offset = fields.get("nested_offset") if nested else 0.0
    if not isinstance(offset, int | float) or not math.isfinite(offset):
        raise BadTensors(f"{STATE}: nested_offset must be a finite number")
    blocks = fields["nested_blocksize"] if nested else 0
    return State((shape[0], shape[1]), fields["blocksize"], blocks, float(offset))


def weight_shape(state: State, sizes: Sizes) -> tuple[int, int]:
    """Return (out, in) of the weight.

    Raises:
        BadTensors: the tensors do not fit each other.
    """
    if "weight" not in sizes:
        raise BadTensors("weight is missing")
    count = math.prod(state.shape)
    stored = math.prod(sizes["weight"])
    if stored != -(-count // 2):
        raise BadTensors(f"weight has {stored} bytes, it must have half of {list(state.shape)}")
    num_blocks = -(-count // state.blocksize)
    must_be("weight.quant_map", sizes, (16,))
    must_be("weight.absmax", sizes, (num_blocks,))
    if state.nested_blocksize:
        must_be("weight.nested_quant_map", sizes, (256,))
        must_be("weight.nested_absmax", sizes, (-(-num_blocks // state.nested_blocksize),))
    return state.shape


def stretch(state: State, sizes: Sizes, dim: int, run: range) -> Stretch[State]:
    """Return which slices to read for a run of outputs (`dim` 0); for inputs (1) all of it.

    The rows of a run of outputs are adjacent in the flattened weight, but any block may hold
    numbers of any column.
    """
    num_outputs, num_inputs = state.shape
    if dim == 1 or sizes["weight"][0] != -(-num_outputs * num_inputs // 2):
        return Stretch({}, run.start, state)
    unit = math.lcm(2, state.blocksize * max(state.nested_blocksize, 1))
    wide = in_units(run, unit // math.gcd(unit, num_inputs), num_outputs)
    flat = range(wide.start * num_inputs, wide.stop * num_inputs)
    slices = {"weight": along(0, flat, 2), "weight.absmax": along(0, flat, state.blocksize)}
    if state.nested_blocksize:
        each = state.blocksize * state.nested_blocksize
        slices["weight.nested_absmax"] = along(0, flat, each)
    state = replace(state, shape=(len(wide), num_inputs))
    return Stretch(slices, run.start - wide.start, state)


def weight(state: State, tensors: Tensors) -> torch.Tensor:
    """Return the weight [out, in] in float32.

    Raises:
        BadTensors: a scale or an entry of a table is not finite.
    """
    table = finite("weight.quant_map", tensors)
    # [256, 2]: the two numbers that each byte stands for.
    pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1)
    count = math.prod(state.shape)
    numbers = F.embedding(tensors["weight"].flatten().int(), pairs).flatten()[:count]
    return _scaled(numbers, _scales(state, tensors), state.blocksize).view(state.shape)


def _scales(state: State, tensors: Tensors) -> torch.Tensor:
    """Return the scale of each block, float32 [blocks]. Raises BadTensors."""
    are_indices = tensors["weight.absmax"].dtype == torch.uint8
    if are_indices != (state.nested_blocksize > 0):
        which = ("bytes", "has no") if are_indices else ("no bytes", "has")
        raise BadTensors(f"weight.absmax is of {which[0]}, and {which[1]} {NESTED[0]}")
    if not are_indices:
        return finite("weight.absmax", tensors)
    table = finite("weight.nested_quant_map", tensors)
    scales = table[tensors["weight.absmax"].int()]
    nested = finite("weight.nested_absmax", tensors)
    return _scaled(scales, nested, state.nested_blocksize).add_(state.nested_offset)


def _scaled(numbers: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """Multiply each block of `size` numbers by its scale, in place; return `numbers` [n].

    scales  [ceil(n / size)]; the last block may be shorter than `size`
    """
    whole = len(numbers) // size
    numbers[: whole * size].view(whole, size).mul_(scales[:whole, None])
    numbers[whole * size :].mul_(scales[-1])
    return numbers


def _is_count(value: object) -> bool:
    """True if the value is a whole number from 1 to `_LARGEST`."""
    return type(value) is int and 1 <= value <= _LARGEST
