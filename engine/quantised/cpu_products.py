"""Products of a few rows with a quantised matrix on a CPU, without dequantising it.

Owns the layout that cpu_products.cpp reads (it is described there). Inputs and outputs are float32
or bfloat16; codes, scales and sums are exact or float32, so the weight is the matrix itself and no
rounded copy of it.
"""

from functools import partial

import torch

from engine.forward.operators import Product
from engine.quantised.cpu_library import library
from engine.quantised.matrix import QuantisedMatrix

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
    if not _is_covered(matrix, dtype) or library() is None:
        return None
    return _Packed(matrix, bias)


def _is_covered(matrix: QuantisedMatrix, dtype: torch.dtype) -> bool:
    num_inputs = matrix.shape[1]
    fits = matrix.group % _INPUTS[matrix.bits] == 0 and num_inputs % matrix.group == 0
    has_offsets = matrix.bits == 4
    if matrix.units is not None:
        unit = num_inputs // matrix.units.shape[2]
        fits &= unit % matrix.group == 0
        fits &= matrix.scales.dtype == (torch.uint8 if has_offsets else torch.int8)
    return fits and dtype in DTYPES and (matrix.offsets is not None) == has_offsets


class _Packed:
    """x [n, in] -> x W^T + b [n, out], with W laid out as cpu_products.cpp reads it."""

    def __init__(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> None:
        self.shape, self.group = matrix.shape, matrix.group
        num_inputs = self.shape[1]
        units = matrix.units
        unit = num_inputs if units is None else num_inputs // units.shape[2]
        self._has_sums = matrix.offsets is not None
        self._num_groups = num_inputs // self.group
        self._memory = (  # keeps alive what the addresses below point to
            codes_of_8_bits(matrix.codes) if matrix.bits == 8 else codes_of_4_bits(matrix.codes),
            by_tile(matrix.scales),
            None if matrix.offsets is None else by_tile(matrix.offsets),
            None if units is None else torch.stack([by_tile(one) for one in units], dim=2),
            None if bias is None else bias.float().contiguous(),
        )
        addresses = [0 if one is None else one.data_ptr() for one in self._memory]
        form, is_signed = _FORMS[matrix.scales.dtype], int(matrix.scales.dtype == torch.int8)
        found = library()
        assert found is not None
        self._product = partial(found, matrix.bits, form, is_signed)
        self._rest = (*addresses, *self.shape, self.group, unit)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the matrix takes."""
        return sum(one.nbytes for one in self._memory if one is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs [n, out], of the type of x."""
        x = x.contiguous()
        y = x.new_empty(len(x), self.shape[0])
        sums = x.new_empty(len(x) * self._num_groups if self._has_sums else 0, dtype=torch.float32)
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
