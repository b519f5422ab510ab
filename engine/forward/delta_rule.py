"""Gated delta rule (Qwen3-Next, Qwen3.5): layers that keep one running state, over slots.

    S_t = a_t S_(t-1) + k_t b_t (v_t - k_t' a_t S_(t-1))'          o_t = q_t' S_t

What a token gives to the states behind it: its key, value, b and the logarithm of a. How a state
comes of these, and where it is kept: `running_states.py`.

The modules stay transformers'; where the cache is ours, their forward is this one, and the sums are
made by transformers' own function. Passes of several texts run one text after another.
"""

import sys
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine.forward.cache_tensors import ShapeCache, SlotCache
from engine.forward.running_states import FLOAT32_BYTES, convolved, summed

CLASSES = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
BESIDE_ATTENTION = False
CONVOLUTION = "conv1d"


class _Tokens(NamedTuple):
    """What tokens give to the states behind them: [..., n, heads, dim], [..., n, heads]."""

    keys: torch.Tensor
    values: torch.Tensor
    betas: torch.Tensor
    decays: torch.Tensor


def state_bytes(module: Any) -> int:
    """Return the bytes of one text's state: [heads, key dim, value dim] in float32."""
    return int(module.value_dim) * int(module.head_k_dim) * FLOAT32_BYTES


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
    normed = module.norm(heads, gate.reshape(-1, module.head_v_dim))
    made: torch.Tensor = module.out_proj(normed.view(*entering.shape[:2], -1))
    return made


def _projected(
    module: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (queries, keys and values before the convolution, gates, b, logarithms of a)."""
    if hasattr(module, "in_proj_qkvz"):
        parts = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
        q, k, v, gate, b, a = module.fix_query_key_value_ordering(*parts)
        entering = torch.cat([one.flatten(2) for one in (q, k, v)], dim=-1)
    else:
        entering, gate = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
        b, a = module.in_proj_b(hidden), module.in_proj_a(hidden)
    decays = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)
    return entering, gate, b.sigmoid().float(), decays


def _split(module: Any, given: torch.Tensor) -> _Tokens:
    """Return what slots hold [..., n, size] as parts."""
    sizes = [module.key_dim, module.value_dim, module.num_v_heads, module.num_v_heads]
    keys, values, betas, decays = torch.split(given, sizes, dim=-1)
    by_head = keys.view(*keys.shape[:-1], -1, module.head_k_dim)
    values = values.view(*values.shape[:-1], -1, module.head_v_dim)
    return _Tokens(by_head, values, betas, decays)


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
    num_chains, num_tokens = given.shape[:2]
    num_others = num_tokens - queries.shape[1]
    asked = queries.new_zeros(num_chains, num_tokens, *queries.shape[2:], dtype=torch.float32)
    asked[:, num_others:] = queries
    of = _split(module, given)
    rule = sys.modules[type(module).__module__].torch_chunk_gated_delta_rule
    made: tuple[torch.Tensor, torch.Tensor | None] = rule(
        asked,
        of.keys,
        of.values,
        g=of.decays,
        beta=of.betas,
        initial_state=None if state is None else state.expand(num_chains, -1, -1, -1),
        output_final_state=goes_on,
        use_qk_l2norm_in_kernel=True,
    )
    return made[0][:, num_others:], made[1]
