"""What every packing has in common: the tensors of one layer, what is wrong with them, bits.

A layer's tensors go by the rest of their name: `model.layers.0.mlp.up_proj.qweight` is `qweight`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Tensors = Mapping[str, torch.Tensor]
Sizes = Mapping[str, tuple[int, ...]]
Form = TypeVar("Form")


@dataclass(frozen=True, slots=True)
class Stretch(Generic[Form]):
    """What is read of a layer's tensors for a run of the outputs or inputs of its weight.

    slices  of each tensor; those that are not named are read whole
    start   where the run begins in the weight that these tensors stand for: numbers that share an
            element or a scale with it come along
    form    how they are packed
    """

    slices: Mapping[str, tuple[slice, ...]]
    start: int
    form: Form


class BadTensors(ValueError):
    """The tensors of a layer do not belong together; the text says which and why."""


def must_be(name: str, sizes: Sizes, want: tuple[int, ...]) -> None:
    """Raise BadTensors if a tensor is missing or has another size."""
    if name not in sizes:
        raise BadTensors(f"{name} is missing")
    if sizes[name] != want:
        raise BadTensors(f"{name} is {list(sizes[name])}, it must be {list(want)}")


def matrix(name: str, sizes: Sizes) -> tuple[int, int]:
    """Return the two sizes of a tensor.

    Raises:
        BadTensors: it is missing, or has another number of them, or a zero.
    """
    if name not in sizes:
        raise BadTensors(f"{name} is missing")
    size = sizes[name]
    if len(size) != 2 or 0 in size:
        raise BadTensors(f"{name} is {list(size)}, it must be a matrix")
    return size[0], size[1]


def num_groups(num_inputs: int, group_size: int) -> int:
    """Into how many groups the inputs of a layer fall; -1 stands for one."""
    return 1 if group_size == -1 else -(-num_inputs // group_size)


def in_units(run: range, unit: int, size: int) -> range:
    """Return the whole units of [0, size) that a run lies in; the last one may be shorter."""
    return range(run.start // unit * unit, min(-(-run.stop // unit) * unit, size))


def along(dim: int, run: range, each: int = 1) -> tuple[slice, ...]:
    """Return the slice of a tensor that has one number along `dim` for `each` of a run."""
    return *(slice(None),) * dim, slice(run.start // each, -(-run.stop // each))


def finite(name: str, tensors: Tensors) -> torch.Tensor:
    """Return a tensor of scales in float32.

    Raises:
        BadTensors: it holds NaN or infinity.
    """
    scales = tensors[name].float()
    if not torch.isfinite(scales).all():
        raise BadTensors(f"{name} holds NaN or infinity")
    return scales


def unpack(packed: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Return the unsigned integers in a matrix of int32, in float32, the lowest bits first.

    packed  [r, c] int32
    dim     along which the integers of an element follow each other: the result is longer there
    order   where each integer of an element comes to lie among them, if not in their order
    """
    per_element = 32 // bits
    rows, columns = packed.shape
    shape = (rows, per_element, columns) if dim == 0 else (rows, columns, per_element)
    numbers = torch.empty(shape, device=packed.device)
    for index in range(per_element):
        place = order[index] if order else index
        numbers.select(dim + 1, place).copy_((packed >> (bits * index)) & ((1 << bits) - 1))
    return numbers.flatten(dim, dim + 1)
