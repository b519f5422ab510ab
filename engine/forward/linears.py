"""The products of a model's linear layers, whether their weights are plain or quantised.

Where several layers read the same inputs (query, key and value; gate and up), they become one
product. Plain layers are left to `operators.py`.
"""

import logging
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from engine.forward import operators
from engine.forward.operators import Packer, Product
from engine.quantised import gpu_products
from engine.quantised.cpu_products import quantised_product
from engine.quantised.linear import QuantisedLinear
from engine.quantised.matrix import QuantisedMatrix, stacked

logger = logging.getLogger(__name__)

Linear = torch.nn.Linear | QuantisedLinear


def unpacked(parts: Sequence[Linear]) -> Product:
    """Return the product whose output is the outputs of `parts` concatenated; copies no weight.

    Quantised weights are dequantised at every call: such a product is slow.
    """
    plain = [part for part in parts if isinstance(part, torch.nn.Linear)]
    if len(plain) == len(parts):
        return operators.unpacked(plain)
    if len(parts) == 1:
        return partial(_computed, parts[0])
    return lambda x: torch.cat([_computed(part, x) for part in parts], dim=-1)


def take(
    packer: Packer,
    parts: Sequence[Linear],
    dtype: torch.dtype,
    *,
    leave: bool = False,
    may_split: bool = False,
) -> Product:
    """Return the product of `parts`, as `unpacked` does, with weights in a fast layout.

    dtype  type of the inputs
    leave  True: the weights of `parts` stay, because something else uses them; False: those that
           were copied are freed
    may_split  as for `Packer.take`
    """
    plain = [part for part in parts if isinstance(part, torch.nn.Linear)]
    if len(plain) == len(parts):
        return packer.take(plain, leave=leave, may_split=may_split)
    matrix = _one_matrix(parts)
    if matrix is None:
        products = [take(packer, [part], dtype, leave=leave) for part in parts]
        return lambda x: torch.cat([product(x) for product in products], dim=-1)
    bias = _one_bias(parts, dtype)
    product = _in_few_bits(matrix, bias, dtype)
    if product is None:
        # One text for all matrices: it is shown once.
        logger.warning(
            "no kernel here multiplies with %d-bit weights in %s: they are dequantised",
            matrix.bits,
            str(dtype).removeprefix("torch."),
        )
        product = partial(F.linear, weight=matrix.dequantised(dtype), bias=bias)
    if not leave:
        for part in parts:
            assert isinstance(part, QuantisedLinear)
            part.free()
    return product


def _in_few_bits(
    matrix: QuantisedMatrix, bias: torch.Tensor | None, dtype: torch.dtype
) -> Product | None:
    """Return the product with a matrix in its bits; None: there is no kernel for it here."""
    if matrix.codes.device.type not in gpu_products.DEVICES:
        return quantised_product(matrix, bias, dtype)
    return gpu_products.few_bits_product(matrix, bias) if gpu_products.is_covered(matrix) else None


def _computed(part: Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs of a linear layer."""
    out: torch.Tensor = part(x)
    return out


def _one_matrix(parts: Sequence[Linear]) -> QuantisedMatrix | None:
    """Return the weights of `parts` as one matrix; None if they are of several kinds."""
    matrices = [part.matrix for part in parts if isinstance(part, QuantisedLinear)]
    if len(matrices) < len(parts):
        return None
    return matrices[0] if len(matrices) == 1 else stacked(matrices)


def _one_bias(parts: Sequence[Linear], dtype: torch.dtype) -> torch.Tensor | None:
    """Return the biases of `parts` as one, with zeros for a part that has none; None for none."""
    if all(part.bias is None for part in parts):
        return None
    found: list[torch.Tensor | None] = [part.bias for part in parts]
    biases = [
        _zeros(part, dtype) if bias is None else bias.detach()
        for part, bias in zip(parts, found, strict=True)
    ]
    return torch.cat(biases)


def _zeros(part: Linear, dtype: torch.dtype) -> torch.Tensor:
    """Return a bias of zeros for a layer that has none, where its weight is."""
    weight = part.matrix.codes if isinstance(part, QuantisedLinear) else part.weight
    return torch.zeros(part.out_features, dtype=dtype, device=weight.device)
