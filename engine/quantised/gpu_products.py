"""Products with weights of 8 and 4 bits on a GPU, in their bits (`gpu_kernel.py`).

The kernel has to prove itself: before a model is loaded with such weights, a small matrix of each
form is multiplied on the GPU and compared with the product of its dequantised weight. Where it
cannot be compiled, or is wrong, weights are dequantised as before.

Owns which matrices the kernel takes, and whether it works here. Knows no file and no model.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F

from engine.checkpoint.files import one_line
from engine.errors import ModelError
from engine.quantised.matrix import QuantisedMatrix

Product = Callable[[torch.Tensor], torch.Tensor]
"""Function: x [n, in] -> x W^T + b [n, out]"""

DEVICES = ("cuda",)
# Number type -> largest error of an output that is taken for right, relative to the largest output.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
FEWEST_IN_GROUP = 32  # inputs of a group; of 4-bit floats 16 and 32
_TRIED_ROWS = (1, 32, 33)
_OUTPUTS, _INPUTS = 72, 256  # of the matrices that are tried; the last block of outputs is not full


def is_covered(matrix: QuantisedMatrix) -> bool:
    """True if the kernel multiplies with a matrix."""
    group, num_inputs = matrix.group, matrix.shape[1]
    if matrix.is_float and matrix.bits == 4:
        scales = {16: torch.float8_e4m3fn, 32: torch.float8_e8m0fnu}.get(group)
        is_row = matrix.units is None or matrix.units.shape[2] == 1
        return matrix.scales.dtype == scales and is_row and num_inputs % FEWEST_IN_GROUP == 0
    fits = matrix.units is None and group & -group >= FEWEST_IN_GROUP
    return fits and group * matrix.scales.shape[1] == num_inputs


def few_bits_product(matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Product:
    """Return the product of rows with a matrix that `is_covered`, on the matrix's device."""
    from engine.quantised.gpu_kernel import few_bits  # many installations have no Triton

    form = 2 * matrix.is_float + (matrix.bits == 4)
    codes = matrix.codes.view(torch.uint8) if matrix.is_float else matrix.codes
    is_small = matrix.is_float and matrix.bits == 4
    scales = matrix.scales.view(torch.uint8) if is_small else matrix.scales
    units = None if matrix.units is None else matrix.units[0, :, 0].contiguous()
    offsets = matrix.offsets
    return lambda x: few_bits(x, form, codes, scales, offsets, units, bias)


@cache
def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why weights cannot stay in few bits on a device; None: the kernel works there."""
    if device.type not in DEVICES:
        return f"the kernel is for GPUs, and not for {device.type}"
    try:
        for matrix in _samples(device):
            if not _is_right(matrix, dtype):
                return f"products with {matrix.bits}-bit weights are wrong here"
    except ModelError as error:
        return str(error)
    return None


def _is_right(matrix: QuantisedMatrix, dtype: torch.dtype) -> bool:
    """True if the kernel gives the product with the dequantised weight.

    Raises:
        ModelError: the kernel cannot be compiled or run here.
    """
    weight = matrix.dequantised()
    for num_rows in _TRIED_ROWS:
        generator = torch.Generator().manual_seed(num_rows)
        x = torch.randn(num_rows, _INPUTS, generator=generator).to(matrix.codes.device, dtype)
        want = F.linear(x.float(), weight)
        try:
            got = few_bits_product(matrix, None)(x).float()
        except Exception as failure:  # compilers may raise anything
            raise ModelError(f"the kernel does not run here: {one_line(failure)}") from failure
        if not (got - want).abs().amax() <= _TOLERANCES[dtype] * want.abs().amax():
            return False  # also if it is NaN
    return True


def _samples(device: torch.device) -> Iterator[QuantisedMatrix]:
    """Yield a small random matrix of each form that the kernel has."""
    generator = torch.Generator().manual_seed(1)
    shape = _OUTPUTS, _INPUTS

    def scales(group: int) -> torch.Tensor:
        found: torch.Tensor = torch.rand(_OUTPUTS, _INPUTS // group, generator=generator) + 0.5
        return found

    codes = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    pairs = torch.randint(0, 256, (_OUTPUTS, _INPUTS // 2), generator=generator).to(torch.uint8)
    floats = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    small = scales(16).to(torch.float8_e4m3fn)
    units = scales(_INPUTS)[None].repeat(2, 1, 1)
    for one in (
        QuantisedMatrix(8, codes, scales(64)),
        QuantisedMatrix(4, pairs, scales(32)),
        QuantisedMatrix(4, pairs, scales(32), -8 * scales(32)),
        QuantisedMatrix(8, floats, scales(128), is_float=True),
        QuantisedMatrix(4, pairs, small, None, units, is_float=True),
    ):
        yield one.to(device)
