"""Matrix products, norms and attention of torch's, and our own products on CPUs.

Owns the forms and the layout of weights. Knows no layer, no cache and no model.
"""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.quantised.cpu_products import Product as Product
from engine.quantised.cpu_products import tiled_product

# -- products --------------------------------------------------------------------------------------

# Matrix products with weights that are laid out once, at load.
#
# On a CPU a weight is *packed* into the blocks that oneDNN reads fastest, or lies in *tiles* for
# products of our own. Who makes the `Packer` says which; no product is timed alone.

_TRIED_ROWS = (1, 8)  # of the products by which two layouts are compared
# (Number of rows up to which, multiple of rows of which oneDNN makes a product), and of all others.
_STEPS, _LAST_STEP = ((16, 1), (64, 4)), 16
# Largest difference between two orders of summation, relative to the largest output.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def unpacked(parts: Sequence[torch.nn.Linear]) -> Product:
    """Return the product whose output is the outputs of `parts` concatenated; copies no weight."""
    if len(parts) == 1:
        return partial(F.linear, weight=parts[0].weight, bias=parts[0].bias)
    return lambda x: torch.cat([F.linear(x, part.weight, part.bias) for part in parts], dim=-1)


class MakeProduct(Protocol):
    """Makes products for GPUs: `few_rows.FewRows`."""

    def product(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, may_split: bool
    ) -> Product | None:
        """Return the product with `weight` [N, K] and `bias` [N]; None: torch's is faster."""


class Packer:
    """Lays out a model's weights anew for fast products.

    tiles     True: on a CPU, lay weights out for our own products where this process has them. Else
              they are packed, as in reproducible mode, where the library may not change a text
    few_rows  makes the products, with weights in the layout of the checkpoint; None: products are
              torch's, or on a CPU packed or in tiles
    """

    def __init__(self, *, tiles: bool = False, few_rows: MakeProduct | None = None) -> None:
        self._tiles = tiles
        self._few_rows = few_rows

    def take(
        self, parts: Sequence[torch.nn.Linear], *, leave: bool = False, may_split: bool = False
    ) -> Product:
        """Return the product of `parts`, as `unpacked` does, with weights in a faster layout.

        leave  False: weights of `parts` that were copied are freed (they have no elements
               afterwards). True: they stay, because something else uses them
        may_split  True: the caller adds up partial sums if the product has any (`few_rows.py`)
        """
        weight, bias = stack(parts)
        if self._few_rows is None:
            packed = self._pack(weight, bias)
        else:
            packed = self._few_rows.product(weight, bias, may_split=may_split)
        if not leave and (packed is not None or len(parts) > 1):
            for part in parts:
                unmap(part.weight)
                part.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)
        return packed or partial(F.linear, weight=weight, bias=bias)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
        """Return a product with a weight laid out anew; None: it cannot be, or is wrong."""
        if weight.device.type != "cpu":
            return None
        plain = partial(F.linear, weight=weight, bias=bias)
        for layout in (tiled_product, packed_product) if self._tiles else (packed_product,):
            product = layout(weight, bias)
            if product is not None and _agree(plain, product, weight):
                return product
        return None


def stack(parts: Sequence[torch.nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the stacked weight [sum of out, in] and bias [sum of out], or None for no bias."""
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
    """True if the memory of `part` begins within the memory of `weight`."""
    return 0 <= part.data_ptr() - weight.data_ptr() < weight.nbytes


def unmap(weight: torch.Tensor) -> None:
    """Give a weight's memory pages back to the system; the weight must not be read again.

    A weight in the checkpoint's own dtype is the mapped file, and the mapping lives as long as any
    tensor of the file. Without this, the pages of all its tensors would stay in memory.
    """
    if weight.device.type != "cpu" or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (weight.data_ptr() + weight.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        address, size = ctypes.c_void_p(start), ctypes.c_size_t(length)
        ctypes.CDLL(None).madvise(address, size, mmap.MADV_DONTNEED)


def packed_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    """Return the product with a packed copy of `weight`, or None if oneDNN cannot pack it."""
    if not torch._C._has_mkldnn:
        return None
    try:
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        multiply(weight.new_zeros(1, weight.shape[1]), blocks, bias, "none", [], "")
    except (RuntimeError, AttributeError):
        return None

    exact = _STEPS[0][0]

    def product(x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        num_more = rows_made(num_rows) - num_rows if num_rows > exact else 0
        if num_more:  # never while decoding, which is not kept waiting
            x = F.pad(x, (0, 0, 0, num_more))
        made: torch.Tensor = multiply(x, blocks, bias, "none", [], "")
        return made[:num_rows] if num_more else made

    return product


def rows_made(num_rows: int) -> int:
    """Return the number of rows that oneDNN is given for a product of `num_rows`; the rest are 0.

    For each number of rows and each shape it makes a program of half a megabyte, takes a
    millisecond for it, and keeps a thousand of them. So of many rows it gets few numbers.
    """
    step = next((step for most, step in _STEPS if num_rows <= most), _LAST_STEP)
    return -(-num_rows // step) * step


def _agree(one: Product, other: Product, weight: torch.Tensor) -> bool:
    """True if both products give the same numbers for random rows, up to summation order."""
    for num_rows in _TRIED_ROWS:
        x = _rows(num_rows, weight)
        a, b = one(x).float(), other(x).float()
        if not bool((a - b).abs().max() <= TOLERANCES[weight.dtype] * a.abs().max()):
            return False
    return True


def _rows(num_rows: int, weight: torch.Tensor) -> torch.Tensor:
    """Return random inputs [num_rows, in] for a product with `weight`."""
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, weight.shape[1], generator=generator).to(weight.dtype)


# -- norms -----------------------------------------------------------------------------------------

# Forms of the root-mean-square norm (RMSNorm): of pairs on CPUs, at once on GPUs.
#
# x -> weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, in float32. Owns the forms.
# Knows no layer and no model.

Form = Callable[[torch.Tensor | None, int, float], Product]
"""Function: (weight [dim], or None for ones; dim; epsilon) -> a function that computes the norm"""


def of_pairs(weight: torch.Tensor | None, dim: int, epsilon: float) -> Product:
    """Return the RMS norm computed as a layer norm of [x, -x] (mean zero, variance mean(x^2)).

    It takes three operators, where torch's own on a CPU may take six.
    """
    both, shape = None if weight is None else torch.cat((weight, weight)), (2 * dim,)

    def norm(x: torch.Tensor) -> torch.Tensor:
        pair = torch.cat((x, x.neg()), -1)
        return torch.layer_norm(pair, shape, both, None, epsilon).narrow(-1, 0, dim)

    return norm


def at_once(weight: torch.Tensor | None, dim: int, epsilon: float) -> Product:
    """Return the RMS norm computed by torch's own function."""
    return lambda x: F.rms_norm(x, (dim,), weight, epsilon)


def rms_norm(weight: torch.Tensor, epsilon: float, form: Form) -> Product:
    """Return the RMS norm over the last dimension, in the given form.

    weight  [dim] for rows [n, dim], or [heads, dim] for rows of heads [n, heads, dim]
    """
    dim = weight.shape[-1]
    if weight.dim() == 1:
        return form(weight, dim, epsilon)
    norm = form(None, dim, epsilon)
    return lambda x: norm(x).mul_(weight)


# -- attention -------------------------------------------------------------------------------------

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Function: (query, keys, values, mask, scale) -> outputs, of the query's shape

query         [lanes, kv_heads, n * group, dim]: the query heads of a group as rows of a key head
keys, values  [lanes, kv_heads, num_visible, dim]
mask          [lanes, 1, n * group or 1, num_visible], added to the scaled scores
"""


def side_by_side(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return attention by torch's fused kernel, a group's heads as rows over one key head.

    On a CPU a row that is alone is computed twice: of one row torch's kernel for a CPU without
    arithmetic in bfloat16 takes ten times as long as of two.
    """
    is_alone = query.shape[2] == 1 and query.device.type == "cpu"
    rows = query.expand(-1, -1, 2, -1) if is_alone else query
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    return out[:, :, :1] if is_alone else out
