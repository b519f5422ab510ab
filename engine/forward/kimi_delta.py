"""Kimi's delta attention (Kimi Linear, Ling 3): the delta rule with decays by channel, over slots.

What a token gives to the states behind it: its key, value, b and the logarithms of its decays. How
a state comes of these: `corrected_sums.py`; where it is kept: `running_states.py`.

The modules stay transformers'; where the cache is ours, their forward is this one. Passes of
several texts run one text after another.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engine.forward.cache_tensors import ShapeCache, SlotCache
from engine.forward.corrected_sums import corrected_sums
from engine.forward.running_states import FLOAT32_BYTES, convolved, summed

CLASSES = ("BailingHybridDeltaAttention", "KimiLinearDeltaAttention")
BESIDE_ATTENTION = False
CONVOLUTION = "conv1d"


def state_bytes(module: Any) -> int:
    """Return the bytes of one text's two states: [heads, dim, dim] in float32 each."""
    return 2 * int(module.qkv_dim) * int(module.head_dim) * FLOAT32_BYTES


def forward(
    module: Any, place: int, hidden_states: torch.Tensor, cache: SlotCache | ShapeCache
) -> torch.Tensor:
    """Return the layer's outputs [1, n, width] (`more_layers.Kind`)."""
    projections = module.q_proj, module.k_proj, module.v_proj
    entering = torch.cat([one(hidden_states) for one in projections], dim=-1)
    size = 3 * module.qkv_dim + module.num_heads
    mixed = F.silu(convolved(entering, module.conv1d, size, cache, place)).to(entering.dtype)
    queries, keys, values = mixed.float().chunk(3, dim=-1)
    betas = module.b_proj(hidden_states).sigmoid().float()
    decays = module.forget_gate(hidden_states).float().flatten(2)
    given = torch.cat((keys, values, decays, betas), dim=-1)
    queries = queries.view(*queries.shape[:2], -1, module.head_dim)
    rule = partial(_run, module)
    rows = summed(rule, queries, given, entering, cache, place)
    gate = _gate(module, hidden_states).view(rows.shape)
    made: torch.Tensor = module.o_proj(module.o_norm(rows.to(gate.dtype), gate).flatten(2))
    return made


def _gate(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the numbers that gate outputs, [1, n, qkv_dim]."""
    if hasattr(module, "g_proj"):
        made: torch.Tensor = module.g_proj(hidden)
    else:
        made = module.g_b_proj(module.g_a_proj(hidden))
    return made


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
    state    [1, heads, dim, dim]
    """
    size = module.qkv_dim
    keys, values, decays, betas = torch.split(given, [size, size, size, module.num_heads], dim=-1)
    shape = *given.shape[:2], -1, module.head_dim
    keys, values, decays = (one.view(shape) for one in (keys, values, decays))
    return corrected_sums(queries, keys, values, betas, decays, state, goes_on=goes_on)
