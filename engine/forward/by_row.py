"""Transformers' modules on a CPU with linear layers and attention of our own.

With these a row's numbers do not depend on the other rows of its pass, as in our own forward
(`cpu_attention.py`, `cpu_products.py`). What lies between (norms, activations, rotations) is
torch's: it goes by rows as far as a row's numbers fill whole vectors, which the check at load
tests (`engine/exact.py`). Attention that ours does not compute (sinks, capped scores, heads of odd
sizes) stays transformers'; then rows may depend on each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.forward.cache_tensors import SlotCache
from engine.forward.cpu_attention import CpuAttention, Heads, Sight, cpu_attention, fits
from engine.forward.operators import lies_in, unmap
from engine.layout.attention_windows import LayerKinds
from engine.layout.slots import Span
from engine.quantised.cpu_products import Product, tiled_product

_LINEAR = F.linear
_NAME = "slipstream_by_row"  # of our attention among transformers'
_USUAL = "sdpa"  # whose place it takes
_OURS = "_slipstream_by_row"  # attribute of a layer's attention
# Arguments of an attention that change its result; ours takes none of them.
_CHANGES = ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "alibi")


class ByRow:
    """Linear layers and attention of one model, computed by rows.

    num_own, num_others  calls of attention that were ours, and calls of attention and of linear
                         layers that were left to torch
    """

    def __init__(self, attention: CpuAttention, cache: SlotCache, kinds: LayerKinds) -> None:
        self.attention = attention
        self.num_own = self.num_others = 0
        self._cache = cache
        self._kinds = kinds
        self._sight: Sight | None = None
        self._products: dict[int, Product] = {}  # by the address of the weight

    # -- linear layers ----------------------------------------------------------------------------

    def lay_out(self, model: Any) -> None:
        """Lay out the weights of a model's linear layers anew, and give back what they took."""
        kept = {
            parameter.data_ptr()
            for module in model.modules()
            if not _is_linear(module)
            for parameter in module.parameters(recurse=False)
        }
        for module in filter(_is_linear, model.modules()):
            if self._add(module.weight) and module.weight.data_ptr() not in kept:
                unmap(module.weight)

    def _add(self, weight: torch.Tensor) -> bool:
        """Lay out a weight anew; False: it stays as it is."""
        product = tiled_product(weight.detach(), None) if weight.dim() == 2 else None
        if product is not None:
            self._products[weight.data_ptr()] = product
        return product is not None

    @contextmanager
    def linear_layers(self) -> Iterator[None]:
        """Within this, what calls torch's function for linear layers gets our product."""
        functions: Any = F
        functions.linear = self._linear
        try:
            yield
        finally:
            functions.linear = _LINEAR

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x W^T + b, as `torch.nn.functional.linear` does."""
        product = self._products.get(weight.data_ptr())
        if product is None and isinstance(weight, torch.nn.Parameter) and self._add(weight):
            product = self._products[weight.data_ptr()]  # of a router, for example
        if product is None or x.dtype != weight.dtype:
            self.num_others += 1
            return _LINEAR(x, weight, bias)
        y = product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], len(weight))
        return y if bias is None else y.add_(bias)

    # -- attention --------------------------------------------------------------------------------

    def see(self, rows: torch.Tensor, spans: Sequence[Span]) -> None:
        """Note what the rows of the next pass see (`CpuAttention.see`)."""
        self._sight = self.attention.see(rows, spans)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        more: Mapping[str, Any],
    ) -> torch.Tensor | None:
        """Return the outputs [1, n, heads, dim] of a layer's attention; None: not by ours.

        module  transformers' attention
        query, key, value  [1, heads, n, dim], [1, kv_heads, slots seen, dim] twice
        more    further arguments of the attention
        """
        layer, sight = getattr(module, "layer_idx", None), self._sight
        if layer is None or sight is None or any(more.get(name) is not None for name in _CHANGES):
            return None
        kind = 0 if self._kinds.is_uniform else self._kinds.of_layers[layer]
        keys, values = self._cache.layers_parts(layer)
        if not (_is_of(key, keys) and _is_of(value, values) and keys.shape == values.shape):
            return None
        num_kv_heads, num_slots, dim = keys.shape
        _, num_heads, num_rows, width = query.shape
        if width != dim or not fits(query.dtype, dim) or query.dtype != keys.dtype:
            return None
        heads = Heads(num_heads, num_kv_heads, dim, num_slots)
        scale = dim**-0.5 if scaling is None else scaling
        look = sight.look(kind, heads, num_heads * dim, scale)
        rows = query[0].transpose(0, 1).reshape(num_rows, -1).contiguous()
        out = self.attention.attend(look, rows, keys, values)
        self.num_own += 1
        return out.view(1, num_rows, num_heads, dim)


def _is_linear(module: Any) -> bool:
    """True if a module is a linear layer, with the forward of one."""
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


def _is_of(seen: torch.Tensor, part: torch.Tensor) -> bool:
    """True if `seen` [1, heads, slots, dim] is a view of a layer's part [heads, slots, dim]."""
    same = seen.shape[1] == part.shape[0] and seen.stride()[1:] == part.stride()
    return same and lies_in(seen, part)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention with the interface of transformers; see `ByRow.attend`."""
    own: ByRow | None = getattr(module, _OURS, None)
    out = None if own is None else own.attend(module, query, key, value, scaling, more)
    if out is not None:
        return out, None
    if own is not None:
        own.num_others += 1
    made: tuple[torch.Tensor, torch.Tensor | None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
    )
    return made


def take_over(model: Any, cache: SlotCache, kinds: LayerKinds) -> ByRow | None:
    """Let a model's linear layers, attention and experts be ours, in place; return them.

    None: this process has no library, or the model has another type of numbers.
    """
    some = next(model.parameters())
    attention = cpu_attention(some.dtype, cache.capacity, kinds)
    if attention is None:
        return None
    ours = ByRow(attention, cache, kinds)
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _OURS, ours)
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == _USUAL:
            config._attn_implementation_internal = _NAME
    ours.lay_out(model)
    return ours
