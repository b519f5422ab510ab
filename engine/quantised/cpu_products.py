"""Matrix products with quantised weights on a CPU.

A stand-in: the matrix is dequantised once, and the product is torch's own.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from engine.quantised.matrix import QuantisedMatrix


def quantised_product(
    matrix: QuantisedMatrix, bias: torch.Tensor | None, dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the product x [n, in] -> x W^T + b [n, out]; None: there is no kernel here."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    return partial(F.linear, weight=matrix.dequantised(dtype), bias=bias)
