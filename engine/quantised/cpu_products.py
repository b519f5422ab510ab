"""Products of a few rows with a quantised or bfloat16 matrix on a CPU, without dequantising it.

Owns the layout that cpu_products.cpp reads (it is described there). Inputs and outputs are float32
or bfloat16; codes, scales and sums are exact or float32, so the weight is the matrix itself and no
rounded copy of it. A row's outputs are the same bits whatever other rows there are, and however
many threads compute.
"""

from collections.abc import Callable
from functools import partial

import torch

from engine.quantised.cpu_library import library
from engine.quantised.matrix import QuantisedMatrix

Product = Callable[[torch.Tensor], torch.Tensor]
"""Function: x [n, in] -> x W^T + b [n, out]"""

DTYPES = (torch.float32, torch.bfloat16)
TILE = 16  # outputs that lie side by side

_FORMS = {torch.float32: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 3}
_INPUTS = {8: 4, 4: 8}  # bits -> number of inputs in 64 bytes of a tile


def quantised_product(
    matrix: QuantisedMatrix, bias: torch.Tensor | None, dtype: torch.dtype
) -> Product | None:
    """Return the product with `matrix`, or None if it cannot be computed without dequantising.

    matrix  is not needed afterwards: its numbers are laid out anew
    bias    [out] or None
    dtype   of inputs and outputs
    """
    found = library() if _is_covered(matrix, dtype) else None
    if found is None:
        return None
    codes, num_inputs, units = matrix.codes, matrix.shape[1], matrix.units
    form, is_signed = _FORMS[matrix.scales.dtype], int(matrix.scales.dtype == torch.int8)
    memory = (
        codes_of_8_bits(codes) if matrix.bits == 8 else codes_of_4_bits(codes),
        by_tile(matrix.scales),
        None if matrix.offsets is None else by_tile(matrix.offsets),
        None if units is None else torch.stack([by_tile(one) for one in units], dim=2),
        None if bias is None else bias.float().contiguous(),
    )
    unit = num_inputs if units is None else num_inputs // units.shape[2]
    product = partial(found, matrix.bits, form, is_signed)
    return TiledProduct(product, memory, (*matrix.shape, matrix.group, unit))


def tiled_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    """Return the product with a bfloat16 matrix [out, in] in tiles, or None.

    None: another dtype, an odd number of inputs, or the library was not compiled by an earlier
    start (this one does not compile it: that takes ten seconds).
    """
    num_outputs, num_inputs = weight.shape
    is_covered = weight.dtype == torch.bfloat16 and num_inputs % 2 == 0
    found = library(compiles=False) if is_covered else None
    if found is None:
        return None
    pairs = _padded(weight).view(-1, TILE, num_inputs // 2, 2).transpose(1, 2).contiguous()
    memory = pairs, None, None, None, None if bias is None else bias.float().contiguous()
    sizes = num_outputs, num_inputs, num_inputs, num_inputs
    return TiledProduct(partial(found, 16, 0, 0), memory, sizes)


def _is_covered(matrix: QuantisedMatrix, dtype: torch.dtype) -> bool:
    num_inputs = matrix.shape[1]
    fits = matrix.group % _INPUTS[matrix.bits] == 0 and num_inputs % matrix.group == 0
    if matrix.bits == 8:  # seven bits of magnitude hold no 128
        fits &= int(matrix.codes.min()) > -128
    has_offsets = matrix.bits == 4
    if matrix.units is not None:
        unit = num_inputs // matrix.units.shape[2]
        fits &= unit % matrix.group == 0
        fits &= matrix.scales.dtype == (torch.uint8 if has_offsets else torch.int8)
    return fits and dtype in DTYPES and (matrix.offsets is not None) == has_offsets


class TiledProduct:
    """x [n, in] -> x W^T + b [n, out], with W laid out as cpu_products.cpp reads it.

    memory  codes, scales, offsets, units, bias: each a tensor or None
    sizes   numbers of outputs and inputs; of inputs that share a scale, and a unit
    """

    def __init__(
        self,
        product: Callable[..., int],
        memory: tuple[torch.Tensor | None, ...],
        sizes: tuple[int, int, int, int],
    ) -> None:
        self._product = product
        self._memory = memory  # keeps alive what the addresses point to
        self._rest = (*(0 if one is None else one.data_ptr() for one in memory), *sizes)
        self._num_outputs, num_inputs, group, _ = sizes
        has_offsets = memory[2] is not None
        self._num_sums = num_inputs // group if has_offsets else 0  # of a row's inputs, by group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs [n, out], of the type of x."""
        x = x.contiguous()
        y = x.new_empty(len(x), self._num_outputs)
        sums = x.new_empty(len(x) * self._num_sums, dtype=torch.float32)
        addresses = x.data_ptr(), y.data_ptr(), len(x), sums.data_ptr()
        if self._product(int(x.dtype == torch.float32), *self._rest, *addresses):
            raise AssertionError("cpu_products.cpp has no such form")
        return y


def by_tile(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers [out, groups] as [tiles, groups, 16]."""
    padded = _padded(numbers)
    return padded.view(-1, TILE, padded.shape[1]).transpose(1, 2).contiguous()


def codes_of_8_bits(codes: torch.Tensor) -> torch.Tensor:
    """Return codes int8 [out, in] as uint8 [tiles, in / 4, 4, 2, 4, 2], sign and magnitude."""
    codes = _padded(codes)
    signs = (codes < 0).to(torch.uint8) << 7
    split = (codes.abs().view(torch.uint8) | signs).view(-1, 4, 4, codes.shape[1] // 4, 2, 2)
    return split.permute(0, 3, 1, 4, 2, 5).contiguous()


def codes_of_4_bits(codes: torch.Tensor) -> torch.Tensor:
    """Return codes uint8 [out, in / 2], two in each, as uint8 [tiles, in / 8, 16, 2, 2].

    The four inputs of the same parity among eight become a 16-bit number.
    """
    bytes_ = _padded(codes).view(-1, TILE, codes.shape[1] // 4, 4)
    even, odd = bytes_ & 15, bytes_ >> 4
    halves = [part[..., 0::2] | part[..., 1::2] << 4 for part in (even, odd)]
    return torch.stack(halves, dim=3).transpose(1, 2).contiguous()


def _padded(numbers: torch.Tensor) -> torch.Tensor:
    """Return rows padded with zeros to whole tiles."""
    missing = -len(numbers) % TILE
    if not missing:
        return numbers
    return torch.cat((numbers, numbers.new_zeros(missing, *numbers.shape[1:])))
