"""Forms of attention over a slot cache; which is fastest is timed, for processors differ.

One row of queries takes 20 us in one form and 1,000 in another on the same processor, and the other
way round on the next one. Owns the forms; knows no layer, no cache and no model.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import ParamSpec

import torch
import torch.nn.functional as F

from engine.forward.linear import Product

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
