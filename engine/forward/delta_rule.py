"""Gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid): layers with a running state, over slots.

What a token gives to the states behind it: its key, value, b and the logarithm of its decay a. How
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

CLASSES = (
    "OlmoHybridGatedDeltaNet",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
)
BESIDE_ATTENTION = False
CONVOLUTION = "conv1d"


def state_bytes(module: Any) -> int:
    """Return the bytes of one text's two states: [heads, key dim, value dim] in float32 each."""
    return 2 * int(module.value_dim) * int(module.head_k_dim) * FLOAT32_BYTES


def forward(
    module: Any, place: int, hidden_states: torch.Tensor, cache: SlotCache | ShapeCache
) -> torch.Tensor:
    """Return the layer's outputs [1, n, width] (`more_layers.Kind`)."""
    entering, gate, betas, decays = _projected(module, hidden_states)
    size = module.key_dim + module.value_dim + 2 * module.num_v_heads
    mixed = F.silu(convolved(entering, module.conv1d, size, cache, place))
    sizes = [module.key_dim, module.key_dim, module.value_dim]
    queries, keys, values = torch.split(mixed.to(entering.dtype), sizes, dim=-1)
    given = torch.cat((keys, values, betas, decays), dim=-1).float()
    queries = queries.view(*queries.shape[:-1], -1, module.head_k_dim)
    rows = summed(partial(_run, module), queries, given, entering, cache, place)
    heads = rows.reshape(-1, module.head_v_dim).to(gate.dtype)
    is_olmo = hasattr(module, "o_norm")
    norm, out = (module.o_norm, module.o_proj) if is_olmo else (module.norm, module.out_proj)
    normed = norm(heads, gate.reshape(-1, module.head_v_dim))
    made: torch.Tensor = out(normed.view(*entering.shape[:2], -1))
    return made


def _projected(
    module: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (queries, keys and values before the convolution, gates, b, logarithms of a)."""
    if hasattr(module, "in_proj_qkvz"):
        parts = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
        q, k, v, gate, b, a = module.fix_query_key_value_ordering(*parts)
        entering = torch.cat([one.flatten(2) for one in (q, k, v)], dim=-1)
    elif hasattr(module, "q_proj"):
        projections = module.q_proj, module.k_proj, module.v_proj
        entering = torch.cat([one(hidden) for one in projections], dim=-1)
        gate, b, a = module.g_proj(hidden), module.b_proj(hidden), module.a_proj(hidden)
    else:
        entering, gate = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
        b, a = module.in_proj_b(hidden), module.in_proj_a(hidden)
    decays = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)
    betas = b.sigmoid() * (2.0 if getattr(module, "allow_neg_eigval", False) else 1.0)
    return entering, gate, betas.float(), decays


def _run(
    module: Any,
    queries: torch.Tensor,
    given: torch.Tensor,
    state: torch.Tensor | None,
    *,
    goes_on: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run chains of tokens (`running_states.Rule`).

    queries  [B, q, key heads, key dim]
    state    [1, heads, key dim, dim]
    """
    sizes = [module.key_dim, module.value_dim, module.num_v_heads, module.num_v_heads]
    keys, values, betas, decays = torch.split(given, sizes, dim=-1)
    keys = keys.view(*keys.shape[:2], -1, module.head_k_dim)
    values = values.view(*values.shape[:2], -1, module.head_v_dim)
    of_each = module.num_v_heads // module.num_k_heads
    queries, keys = (one.repeat_interleave(of_each, dim=2) for one in (queries, keys))
    return corrected_sums(queries, keys, values, betas, decays[..., None], state, goes_on=goes_on)
