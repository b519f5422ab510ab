"""Products of a few rows with a quantised, bfloat16 or float32 matrix on a CPU, as it is.

Owns the layout that cpu_products.h reads (it is described there). Inputs and outputs are float32
or bfloat16; codes, scales and sums are exact or float32, so the weight is the matrix itself and no
rounded copy of it. With weights of 8 or 4 bits, inputs in bfloat16 become 16-bit integers per group
where the processor multiplies 8-bit integers (cpu_products.h says how exact these are); in
float32, and on other processors, they stay as they are. A row's outputs are the same bits whatever
other rows there are, and however many threads compute.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from engine.cpu_library import library
from engine.quantised.matrix import QuantisedMatrix

Product = Callable[[torch.Tensor], torch.Tensor]
"""Function: x [n, in] -> x W^T + b [n, out]"""

DTYPES = (torch.float32, torch.bfloat16)
TILE = 16  # outputs that lie side by side
MOST_IN_GROUP = 1 << 16  # sums of more products of 8 bits may not fit into 32

_FORMS = {torch.float32: 1, torch.float16: 2, torch.uint8: 3, torch.int8: 4}
_PER_LANE = {torch.float32: 1, torch.bfloat16: 2}  # inputs that a 32-bit lane of a tile holds
_INPUTS = {8: 4, 4: 8}  # bits -> number of inputs in 64 bytes of a tile


class _Matrix(ctypes.Structure):
    """The structure `Matrix` of cpu_products.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("bits", "form")),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "offsets", "units", "bias")),
        *((name, ctypes.c_int64) for name in ("num_outputs", "num_inputs", "group", "unit")),
    )


@cache
def _function(library: ctypes.CDLL) -> Callable[..., int]:
    """Return the function `slipstream_product` of cpu_products.cpp."""
    product = library.slipstream_product
    product.restype = ctypes.c_int
    product.argtypes = (
        *(ctypes.c_void_p, ctypes.c_int),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
    )
    return product


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
    memory = (
        codes_of_8_bits(codes) if matrix.bits == 8 else codes_of_4_bits(codes),
        by_tile(matrix.scales),
        None if matrix.offsets is None else by_tile(matrix.offsets),
        None if units is None else torch.stack([by_tile(one) for one in units], dim=2),
        None if bias is None else bias.float().contiguous(),
    )
    unit = num_inputs if units is None else num_inputs // units.shape[2]
    form = matrix.bits, _FORMS[matrix.scales.dtype]
    return TiledProduct(_function(found), form, memory, (*matrix.shape, matrix.group, unit))


def tiled_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    """Return the product with a float32 or bfloat16 matrix [out, in] in tiles, or None.

    None: another dtype, bfloat16 with an odd number of inputs, or this process has no library (it
    does not compile it here: that takes twenty seconds).
    """
    num_outputs, num_inputs = weight.shape
    per_lane = _PER_LANE.get(weight.dtype, 0)
    is_covered = per_lane > 0 and num_inputs % per_lane == 0
    found = library(compiles=False) if is_covered else None
    if found is None:
        return None
    apart = _padded(weight).view(-1, TILE, num_inputs // per_lane, per_lane)
    tiles = apart.transpose(1, 2).contiguous()
    memory = tiles, None, None, None, None if bias is None else bias.float().contiguous()
    sizes = num_outputs, num_inputs, num_inputs, num_inputs
    return TiledProduct(_function(found), (8 * weight.dtype.itemsize, 0), memory, sizes)


def four_bits_in_tiles(
    found: ctypes.CDLL,
    memory: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sizes: tuple[int, int, int, int],
) -> "TiledProduct":
    """Return the product with codes of 4 bits, float16 scales and offsets that lie in tiles."""
    form = 4, _FORMS[torch.float16]
    return TiledProduct(_function(found), form, (*memory, None, None), sizes)


def _is_covered(matrix: QuantisedMatrix, dtype: torch.dtype) -> bool:
    num_inputs = matrix.shape[1]
    fits = matrix.group % _INPUTS[matrix.bits] == 0 and num_inputs % matrix.group == 0
    fits &= matrix.group <= MOST_IN_GROUP
    if matrix.units is not None:
        fits &= num_inputs // matrix.units.shape[2] % matrix.group == 0
    return fits and dtype in DTYPES and not matrix.is_float


class TiledProduct:
    """x [n, in] -> x W^T + b [n, out], with W laid out as cpu_products.h reads it.

    form    bits of a weight; form of its scales
    memory  codes, scales, offsets, units, bias: each a tensor or None
    sizes   numbers of outputs and inputs; of inputs that share a scale, and a unit
    """

    def __init__(
        self,
        product: Callable[..., int],
        form: tuple[int, int],
        memory: tuple[torch.Tensor | None, ...],
        sizes: tuple[int, int, int, int],
    ) -> None:
        self._product = product
        self._memory = memory  # keeps alive what the addresses point to
        addresses = (0 if one is None else one.data_ptr() for one in memory)
        self._matrix = _Matrix(*form, *addresses, *sizes)
        self.address = ctypes.addressof(self._matrix)  # of the structure that the library reads
        self.num_outputs, self.num_inputs = sizes[:2]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs [n, out], of the type of x."""
        x = x.contiguous()
        num_rows, is_float32 = len(x), x.dtype == torch.float32
        y = x.new_empty(num_rows, self.num_outputs)
        if self._product(self.address, is_float32, x.data_ptr(), y.data_ptr(), num_rows):
            raise AssertionError("cpu_products.h has no such form")
        return y


def by_tile(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers [out, groups] as [tiles, groups, 16]."""
    padded = _padded(numbers)
    return padded.view(-1, TILE, padded.shape[1]).transpose(1, 2).contiguous()


def codes_of_8_bits(codes: torch.Tensor) -> torch.Tensor:
    """Return codes int8 [out, in] as [tiles, in / 4, 16, 4]."""
    return _padded(codes).view(-1, TILE, codes.shape[1] // 4, 4).transpose(1, 2).contiguous()


def codes_of_4_bits(codes: torch.Tensor) -> torch.Tensor:
    """Return codes uint8 [out, in / 2], two in each, as uint8 [tiles, in / 8, 16, 4].

    Byte j of eight inputs holds input j in its lower half and input 4 + j in its upper half.
    """
    pairs = _padded(codes).view(-1, TILE, codes.shape[1] // 4, 2, 2)  # input 4 h + 2 i (+ 1)
    even, odd = pairs & 15, pairs >> 4
    halves = [part[..., 0, :] | part[..., 1, :] << 4 for part in (even, odd)]
    return torch.stack(halves, dim=-1).flatten(3).transpose(1, 2).contiguous()


def _padded(numbers: torch.Tensor) -> torch.Tensor:
    """Return rows padded with zeros to whole tiles."""
    missing = -len(numbers) % TILE
    if not missing:
        return numbers
    return torch.cat((numbers, numbers.new_zeros(missing, *numbers.shape[1:])))
