"""Matrix products, norms and attention, in several forms, and the clock by which some are chosen.

Theory of operation
-------------------
Torch has several ways to compute each of them. Attention of one row may take 20 us in one form and
1,000 us in another on one processor, and the other way round on the next. So this file has several
forms of attention, and they are timed when a model is loaded. Sets of forms are compared by whole
passes.

Owns the forms and the layout of weights. Knows no layer, no cache and no model.
"""

import ctypes
import math
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ParamSpec, Protocol

import torch
import torch.nn.functional as F

from engine.quantised.cpu_products import Product as Product
from engine.quantised.cpu_products import tiled_product

# -- timing ----------------------------------------------------------------------------------------

# Find the fastest of several forms of one computation, by timing them.
#
# Owns the clock. Knows neither what is computed nor what for.

P = ParamSpec("P")

_WARM, _TIMED = 3, 20
_LONG_S = 0.5  # forms that take long are timed at least once each, and no longer than this


def quickest(forms: Mapping[str, Callable[P, object]], *inputs: P.args, **named: P.kwargs) -> str:
    """Return the name of the fastest form; of each the fewest seconds of up to 20 runs count."""
    best = dict.fromkeys(forms, math.inf)
    end = time.perf_counter() + _LONG_S
    with torch.inference_mode():
        for turn in range(_WARM + _TIMED):
            if turn > _WARM and time.perf_counter() > end:
                break
            for name, form in forms.items():
                started = time.perf_counter()
                form(*inputs, **named)
                if turn >= _WARM:
                    best[name] = min(best[name], time.perf_counter() - started)
    return min(best, key=best.__getitem__)


# Rows of the whole passes by which sets of forms are compared: a plain step, and one with one, four
# and eight drafts. A set is taken only if it is slower for none of them.
COMPARED_ROWS = (1, 2, 5, 9)
# A set of which a pass takes this much longer is slower: with less, equal sets would be told apart.
_AS_FAST = 1.05
_TURNS, _TURNS_S = 5, 1.0  # most passes of each, and seconds after which two of each must do

Seconds = Mapping[int, float]
"""Number of rows -> the seconds of a whole pass"""


def seconds_of_passes(
    sets: Mapping[str, Callable[[int], object]], row_counts: Sequence[int]
) -> Mapping[str, Seconds]:
    """Return the fewest seconds of whole passes by each set of forms, for numbers of rows.

    The sets take turns, so that other load slows all alike, and a model that does not fit into the
    caches is read from memory.

    sets  name -> function (number of rows) that runs a pass
    """
    best = {name: dict.fromkeys(row_counts, math.inf) for name in sets}
    end = time.perf_counter() + _TURNS_S
    with torch.inference_mode():
        for turn in range(_TURNS):
            if turn >= 2 and time.perf_counter() > end:
                break
            for num_rows in row_counts:
                for name, run in sets.items():
                    started = time.perf_counter()
                    run(num_rows)
                    taken = time.perf_counter() - started
                    best[name][num_rows] = min(best[name][num_rows], taken)
    return best


def is_never_slower(one: Seconds, other: Seconds) -> bool:
    """True if passes of no number of rows are slower by `one` set of forms than by the `other`."""
    return all(one[num_rows] <= _AS_FAST * other[num_rows] for num_rows in other)


def in_words(seconds: Mapping[str, Seconds]) -> str:
    """Return the milliseconds of passes for a log: "1 row 1.52 (C++), 2.48 (torch); 2 rows ..."."""
    counts = next(iter(seconds.values()))
    return "; ".join(
        f"{count} row{'s' * (count > 1)} "
        + ", ".join(f"{1e3 * by_rows[count]:.2f} ({name})" for name, by_rows in seconds.items())
        for count in counts
    )


Decide = Callable[[str, Sequence[str]], str]
"""Function: (name of the form that was fastest here, names of all) -> name of the form to use"""


def as_timed(name: str, _names: Sequence[str]) -> str:
    """Return `name`: use the form that was fastest here (ranks use another `Decide`)."""
    return name


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


def cache_bytes() -> int:
    """Return the size of the processor's largest cache, at most 128 MiB."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return min(int(size.removesuffix("K")) << 10, 1 << 27)
    except (OSError, ValueError):
        return 1 << 25


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
    """Return attention by torch's fused kernel, a group's heads as rows over one key head."""
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)


def head_by_head(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return attention by torch's fused kernel with grouped heads, for one row per lane."""
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
    """Return attention by torch's fused kernel, each row twice: one row alone may be slow."""
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
    """Return attention by two matrix products and a float32 softmax, for one lane."""
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
# Forms for several lanes in one call; `products` would have to copy keys and values.
BATCHED_OF_ONE_ROW = {name: form for name, form in FORMS_OF_ONE_ROW.items() if form is not products}
BATCHED_OF_ROWS: Mapping[str, Attention] = {"side by side": side_by_side}


def one_by_one(form: Attention) -> Attention:
    """Return attention that calls `form` for one lane after another."""

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
