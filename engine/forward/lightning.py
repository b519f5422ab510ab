"""Lightning attention (MiniMax): linear attention whose heads forget at fixed rates, over slots.

    S_t = exp(-r) S_(t-1) + v_t k_t'          o_t = S_t q_t

What a token gives to the states behind it: its key, its value and a 1, which says that there is a
token. How a state comes of these: `decayed_sums.py`; where it is kept: `running_states.py`.

The modules stay transformers'; where the cache is ours, their forward is this one. Passes of
several texts run one text after another.
"""

from functools import partial
from typing import Any

import torch

from engine.forward.cache_tensors import ShapeCache, SlotCache
from engine.forward.decayed_sums import decayed_sums
from engine.forward.running_states import FLOAT32_BYTES, summed

CLASSES = ("MiniMaxLightningAttention",)
BESIDE_ATTENTION = False
CONVOLUTION = ""


def state_bytes(module: Any) -> int:
    """Return the bytes of one text's two states: [heads, dim, dim] in float32 each."""
    return 2 * int(module.num_attention_heads) * int(module.head_dim) ** 2 * FLOAT32_BYTES


def forward(
    module: Any, place: int, hidden_states: torch.Tensor, cache: SlotCache | ShapeCache
) -> tuple[torch.Tensor, None]:
    """Return the layer's outputs [1, n, width] (`more_layers.Kind`), and no weights."""
    made = module.act_fn(module.qkv_proj(hidden_states))
    made = made.view(*made.shape[:2], module.num_attention_heads, -1)
    queries, keys, values = made.float().chunk(3, dim=-1)
    ones = keys.new_ones(*keys.shape[:2], 1)
    given = torch.cat((keys.flatten(2), values.flatten(2), ones), dim=-1)
    nothing = made.new_zeros(*made.shape[:2], 0)  # there is no convolution
    rows = summed(partial(_run, module), queries, given, nothing, cache, place)
    rows = module.norm(rows.flatten(2).to(made.dtype))
    rows = module.output_gate(hidden_states).sigmoid() * rows
    return module.out_proj(rows), None


def _run(
    module: Any,
    queries: torch.Tensor,
    given: torch.Tensor,
    state: torch.Tensor | None,
    *,
    goes_on: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run chains of tokens (`running_states.Rule`).

    queries  [B, q, heads, dim]
    state    [heads, 1, dim, dim]
    """
    size = module.num_attention_heads * module.head_dim
    keys, values, ones = torch.split(given, [size, size, 1], dim=-1)
    keys = keys.view(*keys.shape[:2], -1, module.head_dim)
    values = values.view(*keys.shape[:3], 1, module.head_dim)
    decays = -module.slope_rate.double()[..., 0] * ones[..., None]  # [B, n, heads, 1]
    return decayed_sums(queries, keys, values, decays, state, goes_on=goes_on)
