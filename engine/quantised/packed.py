"""What all quantisation formats share: checks of a layer's tensors, slices of them, unpacking bits.

Here a layer's tensors are named by the end of their full name: `qweight` for
`model.layers.0.mlp.up_proj.qweight`.
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
    """What to read of a packed layer's tensors to dequantise a run of outputs or inputs.

    slices  tensor name -> the slice to read; tensors that are not named are read whole
    start   index of the run's beginning in the weight that is dequantised: it may begin earlier
            than the run, with numbers that share a packed integer or a scale with it
    form    the format of the tensors that are read
    """

    slices: Mapping[str, tuple[slice, ...]]
    start: int
    form: Form


class BadTensors(ValueError):
    """A packed layer's tensors do not fit together or hold invalid values; the text says which."""


def must_be(name: str, sizes: Sizes, want: tuple[int, ...]) -> None:
    """Raise BadTensors if a tensor is missing or has another size."""
    if name not in sizes:
        raise BadTensors(f"{name} is missing")
    if sizes[name] != want:
        raise BadTensors(f"{name} is {list(sizes[name])}, it must be {list(want)}")


def matrix(name: str, sizes: Sizes) -> tuple[int, int]:
    """Return the shape (rows, columns) of the tensor `name`.

    Raises:
        BadTensors: the tensor is missing, is no matrix, or is empty.
    """
    if name not in sizes:
        raise BadTensors(f"{name} is missing")
    size = sizes[name]
    if len(size) != 2 or 0 in size:
        raise BadTensors(f"{name} is {list(size)}, it must be a matrix")
    return size[0], size[1]


def num_groups(num_inputs: int, group_size: int) -> int:
    """Return the number of groups of a layer's inputs; a group size of -1 means one group."""
    return 1 if group_size == -1 else -(-num_inputs // group_size)


def in_units(run: range, unit: int, size: int) -> range:
    """Return `run` widened to whole units of `unit` numbers, but not beyond `size`."""
    return range(run.start // unit * unit, min(-(-run.stop // unit) * unit, size))


def along(dim: int, run: range, each: int = 1) -> tuple[slice, ...]:
    """Return the index that selects `run` along `dim` of a tensor with one element per `each`."""
    return *(slice(None),) * dim, slice(run.start // each, -(-run.stop // each))


def finite(name: str, tensors: Tensors) -> torch.Tensor:
    """Return a tensor of scales in float32. Raises BadTensors if it holds NaN or infinity."""
    scales = tensors[name].float()
    if not torch.isfinite(scales).all():
        raise BadTensors(f"{name} holds NaN or infinity")
    return scales


def groups_of(
    name: str, tensors: Tensors, num_inputs: int, size: int, scales: torch.Tensor, dim: int
) -> torch.Tensor:
    """Return the group of each input, int64 [in]: those that a tensor names, or adjacent ones.

    name    of the tensor that may name them
    size    number of inputs of an adjacent group
    scales  of the layer, one for each group along `dim`

    Raises:
        BadTensors: the tensor names a group that does not exist.
    """
    if name not in tensors:
        return torch.arange(num_inputs, device=scales.device) // size
    groups, count = tensors[name].long(), scales.shape[dim]
    if groups.min() < 0 or groups.max() >= count:
        odd = int(groups.min() if groups.min() < 0 else groups.max())
        raise BadTensors(f"{name} names group {odd}, there are {count}")
    return groups


def unpack(packed: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Return the unsigned integers packed in a matrix of int32, as float32, lowest bits first.

    packed  [r, c] int32; each element holds 32 // bits integers
    dim     dimension along which an element's integers are unpacked: the result is 32 // bits times
            longer there
    order   per integer of an element, its index among them in the result; (): as they lie
    """
    per_element = 32 // bits
    rows, columns = packed.shape
    shape = (rows, per_element, columns) if dim == 0 else (rows, columns, per_element)
    numbers = torch.empty(shape, device=packed.device)
    for index in range(per_element):
        place = order[index] if order else index
        numbers.select(dim + 1, place).copy_((packed >> (bits * index)) & ((1 << bits) - 1))
    return numbers.flatten(dim, dim + 1)
