"""Matrix products with weights that are laid out once, at load.

Owns where a weight lies and which kernel multiplies it. On a CPU a weight may be *packed* into the
blocks that oneDNN reads fastest; whether that pays depends on the shape, the type and the
processor, so it is timed. Knows no layer and no model.
"""

import ctypes
import math
import mmap
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor], torch.Tensor]
"""x [n, in] -> x W^T + b [n, out]"""

# How much a number of rows counts when a layout is chosen: most passes of a drafter and every plain
# step of a target have one row, passes that verify have a handful.
_ROW_WEIGHTS = {1: 2.0, 8: 1.0}
_TIMING_S = 2e-3
_MAX_REPEATS = 40
# Largest difference between two orders of summation, relative to the largest output.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def unpacked(parts: Sequence[torch.nn.Linear]) -> Product:
    """Return the product with the weights of `parts` stacked; they stay where they are."""
    if len(parts) == 1:
        return partial(F.linear, weight=parts[0].weight, bias=parts[0].bias)
    return lambda x: torch.cat([F.linear(x, part.weight, part.bias) for part in parts], dim=-1)


class Packer:
    """Takes weights over from a model, and remembers which layout suits which shape.

    timed  pack what is faster packed; False: all that can be packed, because a clock may choose
           otherwise in the next process, and another layout gives other last bits
    """

    def __init__(self, *, timed: bool = True) -> None:
        self._timed = timed
        # By shape, type and whether there is a bias: whether packing pays.
        self._pays: dict[tuple[torch.Size, torch.dtype, bool], bool] = {}

    def take(self, parts: Sequence[torch.nn.Linear], *, leave: bool = False) -> Product:
        """Return what `unpacked` returns, in the faster layout.

        What is not used any more of the weights of `parts` is freed (they have no elements
        afterwards), but with `leave`: then somebody else uses them.
        """
        weight, bias = stack(parts)
        packed = self._pack(weight, bias)
        if not leave and (packed is not None or len(parts) > 1):
            for part in parts:
                _unmap(part.weight)
                part.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)
        return packed or partial(F.linear, weight=weight, bias=bias)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
        """Return a product with packed weights, if it is right and faster than without."""
        key = weight.shape, weight.dtype, bias is None
        if weight.device.type != "cpu" or not self._pays.get(key, True):
            return None
        plain = partial(F.linear, weight=weight, bias=bias)
        packed = _packed(weight, bias)
        if packed is None or not _agree(plain, packed, weight):
            return None
        if not self._timed:
            return packed
        if key not in self._pays:
            self._pays[key] = _is_faster(packed, plain, weight)
        return packed if self._pays[key] else None


def stack(parts: Sequence[torch.nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return one weight [sum of out, in] and one bias, if any part has one."""
    if len(parts) == 1:
        return parts[0].weight.detach(), parts[0].bias
    weights: list[torch.Tensor] = [part.weight for part in parts]
    weight = torch.cat(weights)
    if all(part.bias is None for part in parts):
        return weight, None
    biases: list[torch.Tensor] = [
        weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts
    ]
    return weight, torch.cat(biases)


def lies_in(part: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the memory of `part` begins in that of `weight`."""
    return 0 <= part.data_ptr() - weight.data_ptr() < weight.nbytes


def _unmap(weight: torch.Tensor) -> None:
    """Give back the whole pages of a weight that nobody will read again.

    Weights in the checkpoint's own type are the file, mapped, and the mapping lives as long as any
    tensor of the file: without this the process would go on holding the pages of all.
    """
    if weight.device.type != "cpu" or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (weight.data_ptr() + weight.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        address, size = ctypes.c_void_p(start), ctypes.c_size_t(length)
        ctypes.CDLL(None).madvise(address, size, mmap.MADV_DONTNEED)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    """Return the product with a packed copy of `weight`, or None where oneDNN has none."""
    if not torch._C._has_mkldnn:
        return None
    try:
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        multiply(weight.new_zeros(1, weight.shape[1]), blocks, bias, "none", [], "")
    except (RuntimeError, AttributeError):
        return None
    return lambda x: multiply(x, blocks, bias, "none", [], "")


def _agree(one: Product, other: Product, weight: torch.Tensor) -> bool:
    """Whether both give the same numbers for random rows, but for the order of summation."""
    for num_rows in _ROW_WEIGHTS:
        x = _rows(num_rows, weight)
        a, b = one(x).float(), other(x).float()
        if not bool((a - b).abs().max() <= _TOLERANCES[weight.dtype] * a.abs().max()):
            return False
    return True


def _is_faster(one: Product, other: Product, weight: torch.Tensor) -> bool:
    """Whether `one` takes less time, on the geometric mean over the numbers of rows."""
    advantage = 0.0
    for num_rows, row_weight in _ROW_WEIGHTS.items():
        x = _rows(num_rows, weight)
        best_one = best_other = math.inf
        end = time.perf_counter() + _TIMING_S
        for repeat in range(_MAX_REPEATS):
            best_one = min(best_one, _seconds(one, x))
            best_other = min(best_other, _seconds(other, x))
            if repeat >= 2 and time.perf_counter() > end:
                break
        advantage += row_weight * math.log(best_other / best_one)
    return advantage > 0


def _seconds(product: Product, x: torch.Tensor) -> float:
    started = time.perf_counter()
    product(x)
    return time.perf_counter() - started


def _rows(num_rows: int, weight: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, weight.shape[1], generator=generator).to(weight.dtype)
