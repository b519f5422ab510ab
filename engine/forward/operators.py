"""Matrix products, norms and attention, each in the form that is fastest on this device.

Theory of operation
-------------------
Torch has several ways to compute each of them. One row of queries takes 20 us in one form of
attention and 1,000 in another on the same processor, and the other way round on the next one. So
the forms are here side by side, and are timed when a model is loaded.

Owns the forms, and where a weight lies. Knows no layer, no cache and no model.
"""

import ctypes
import math
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ParamSpec

import torch
import torch.nn.functional as F

# -- timing ----------------------------------------------------------------------------------------

# Which of several forms of one computation is fastest here: timed, for processors differ.
#
# Owns the clock. Knows neither what is computed nor for whom.

P = ParamSpec("P")

_WARM, _TIMED = 3, 20


def quickest(forms: Mapping[str, Callable[P, object]], *inputs: P.args, **named: P.kwargs) -> str:
    """Return the name of the form that takes least time, by the best of some turns of each."""
    best = dict.fromkeys(forms, math.inf)
    with torch.inference_mode():
        for turn in range(_WARM + _TIMED):
            for name, form in forms.items():
                started = time.perf_counter()
                form(*inputs, **named)
                if turn >= _WARM:
                    best[name] = min(best[name], time.perf_counter() - started)
    return min(best, key=best.__getitem__)


Decide = Callable[[str, Sequence[str]], str]
"""(the form that was quickest here, the names of all) -> the form that is used"""


def as_timed(name: str, _names: Sequence[str]) -> str:
    """Use the form that was quickest here. Ranks of a model all use that of rank 0."""
    return name


# -- products --------------------------------------------------------------------------------------

# Matrix products with weights that are laid out once, at load.
#
# On a CPU a weight may be *packed* into the blocks that oneDNN reads fastest; whether that pays
# depends on the shape, the type and the processor, so it is timed.

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


# -- norms -----------------------------------------------------------------------------------------

# Forms of the root-mean-square norm; which is fastest is timed, for processors differ.
#
# x -> weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, in float32. Owns the forms.
# Knows no layer and no model.

Form = Callable[[torch.Tensor | None, int, float], Product]
"""(weight [dim], or None for ones; dim; epsilon) -> the norm"""


def of_pairs(weight: torch.Tensor | None, dim: int, epsilon: float) -> Product:
    """The layer norm of [x, -x]: their mean is zero and their variance mean(x^2).

    Three operators, where torch on a CPU may spell the norm out in six.
    """
    both, shape = None if weight is None else torch.cat((weight, weight)), (2 * dim,)

    def norm(x: torch.Tensor) -> torch.Tensor:
        pair = torch.cat((x, x.neg()), -1)
        return torch.layer_norm(pair, shape, both, None, epsilon).narrow(-1, 0, dim)

    return norm


def at_once(weight: torch.Tensor | None, dim: int, epsilon: float) -> Product:
    """Torch's own."""
    return lambda x: F.rms_norm(x, (dim,), weight, epsilon)


FORMS: Mapping[str, Form] = {"of pairs": of_pairs, "at once": at_once}


def rms_norm(weight: torch.Tensor, epsilon: float, form: Form) -> Product:
    """Return the norm with `weight` [dim] for each row, or [heads, dim] for each of its heads."""
    dim = weight.shape[-1]
    if weight.dim() == 1:
        return form(weight, dim, epsilon)
    norm = form(None, dim, epsilon)
    return lambda x: norm(x).mul_(weight)


# -- attention -------------------------------------------------------------------------------------

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(query, keys, values, mask, scale) -> outputs, of the query's shape

query         [lanes, kv_heads, n * group, dim]: the query heads of a group side by side
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
    """Torch's fused kernel, with the heads of a group as rows over one key head."""
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)


def head_by_head(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The same kernel told of groups, for one row of a lane: [lanes, heads, 1, dim]."""
    num_lanes, kv_heads, group, dim = query.shape
    apart = query.view(num_lanes, kv_heads * group, 1, dim)
    out = F.scaled_dot_product_attention(
        apart, keys, values, attn_mask=mask, scale=scale, enable_gqa=group > 1
    )
    return out.view(query.shape)


def twice(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The same kernel over two copies of the rows: some have a slow way for a single one."""
    both = torch.cat((query, query), dim=2)
    mask = mask if mask.shape[2] == 1 else torch.cat((mask, mask), dim=2)
    out = F.scaled_dot_product_attention(both, keys, values, attn_mask=mask, scale=scale)
    return out[:, :, : query.shape[2]]


def products(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Two matrix products and a softmax in float32, for one lane."""
    scores = torch.baddbmm(mask[0], query[0], keys[0].transpose(1, 2), alpha=scale)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights, values[0])[None]


FORMS_OF_ONE_ROW: Mapping[str, Attention] = {
    "side by side": side_by_side,
    "head by head": head_by_head,
    "twice": twice,
    "products": products,
}
FORMS_OF_ROWS: Mapping[str, Attention] = {"side by side": side_by_side, "products": products}
# Over several lanes in one call; for products keys and values would have to be copied.
BATCHED_OF_ONE_ROW = {name: form for name, form in FORMS_OF_ONE_ROW.items() if form is not products}
BATCHED_OF_ROWS: Mapping[str, Attention] = {"side by side": side_by_side}


def one_by_one(form: Attention) -> Attention:
    """Lane after lane, each with `form`."""

    def attend(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        lanes = range(len(query))
        parts = [[tensor[i : i + 1] for tensor in (query, keys, values, mask)] for i in lanes]
        return torch.cat([form(q, k, v, shown, scale) for q, k, v, shown in parts])

    return attend
