"""Short convolutions (LFM2): layers that mix each token with the few tokens before it.

    [b, c, x] = W_in h          o_t = W_out (c_t * sum over d of w_d * (b x)_(t-d))      d = 0, 1, 2

What a token gives to the sums of later ones, b x, is kept in the token's slot, half of it in the
place of a key and half in that of a value. So rolling back, moving and copying need nothing else. A
row takes them from the tokens before it on its path, wherever these lie (`SlotCache.see`). The sum
has one order, in float32, so a row does not depend on the rest of its pass.

The modules stay transformers'; where the cache is ours, their forward is this one.
"""

from typing import Any

import torch

from engine.forward.cache_tensors import ShapeCache, SlotCache

CLASSES = ("Lfm2ShortConv", "Lfm2MoeShortConv")
BESIDE_ATTENTION = False
CONVOLUTION = "conv"


def state_bytes(module: Any) -> int:
    """Return 0: all that such a layer keeps lies in slots."""
    del module
    return 0


def _weights(conv: Any) -> torch.Tensor:
    """Return the weights [taps, width], of the row itself last."""
    weights: torch.Tensor = conv.weight
    return weights[:, 0].t()


def forward(
    module: Any, place: int, hidden_states: torch.Tensor, cache: SlotCache | ShapeCache
) -> torch.Tensor:
    """Return the layer's outputs [lanes, n, width] (`more_layers.Kind`)."""
    gate, out_gate, inner = module.in_proj(hidden_states).chunk(3, dim=-1)
    own = gate * inner
    halves = [half[:, None] for half in own.chunk(2, dim=-1)]
    seen = cache.update(*halves, place)
    before = None
    if isinstance(cache, SlotCache):
        before = torch.cat([cache.before(part[:, 0]) for part in seen], dim=-1)
    mixed = mixed_with(before, own, module.conv)
    made: torch.Tensor = module.out_proj(out_gate * mixed.to(own.dtype))
    return made


def mixed_with(before: torch.Tensor | None, own: torch.Tensor, conv: Any) -> torch.Tensor:
    """Return a convolution's sums, float32 [lanes, n, width].

    before  what the tokens before each row on its path give, [lanes, n, taps - 1, width], the
            nearest first; None: nothing
    own     what the rows' tokens give, [lanes, n, width]
    conv    the convolution, of one channel per group
    """
    weights = _weights(conv).float()
    mixed = weights[-1] * own.float()
    if before is not None:
        for back, weight in enumerate(weights[:-1].flip(0)):
            mixed = mixed + weight * before[:, :, back].float()
    if conv.bias is not None:
        mixed = mixed + conv.bias.float()
    return mixed
