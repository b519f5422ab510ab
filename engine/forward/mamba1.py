"""Mamba 1 (Mamba, Falcon Mamba, Jamba, Zamba): the numbers of a state fade at rates of their own.

    S_t = exp(s_t A) S_(t-1) + s_t x_t b_t'          y_t = S_t c_t + D x_t

The decays differ by channel and by number of the state, so shares of tokens in outputs cannot be
computed as a product of matrices (as in Mamba 2); tokens are added one after another. What a token
gives to the states behind it: x, b and its step s of each channel. Where a state is kept:
`running_states.py`.

The modules stay transformers'; where the cache is ours, their forward is this one. Passes of
several texts run one text after another.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engine.forward.cache_tensors import ShapeCache, SlotCache
from engine.forward.running_states import FLOAT32_BYTES, convolved, summed

CLASSES = ("FalconMambaMixer", "JambaMambaMixer", "MambaMixer", "ZambaMambaMixer")
BESIDE_ATTENTION = True
CONVOLUTION = "conv1d"


def state_bytes(module: Any) -> int:
    """Return the bytes of one text's two states: [channels, state] in float32 each."""
    return 2 * int(module.intermediate_size) * int(module.ssm_state_size) * FLOAT32_BYTES


def forward(
    module: Any, place: int, hidden_states: torch.Tensor, cache: SlotCache | ShapeCache
) -> torch.Tensor:
    """Return the layer's outputs [1, n, width] (`more_layers.Kind`)."""
    made, heads = module.in_proj(hidden_states), _num_heads(module)
    if hasattr(module, "n_mamba_heads"):  # in Zamba a channel and its gate lie side by side
        entering, gate = made.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        entering, gate = made.chunk(2, dim=-1)
    size = 2 * module.intermediate_size + heads * module.ssm_state_size
    mixed = module.act(convolved(entering, module.conv1d, size, cache, place))
    x = mixed.to(entering.dtype).view(*mixed.shape[:2], heads, -1)
    b, c, steps = _projected(module, x)
    given = torch.cat((x.float().flatten(2), b.flatten(2), steps.flatten(2)), dim=-1)
    rows = summed(partial(_run, module), c, given, entering, cache, place)
    rows = rows + module.D.float().view(heads, -1) * x.float()
    gated = (rows.flatten(2) * F.silu(gate.float())).to(gate.dtype)
    outputs: torch.Tensor = module.out_proj(gated)
    return outputs


def _num_heads(module: Any) -> int:
    """Return how many heads a layer has; only those of Zamba have more than one."""
    return int(getattr(module, "n_mamba_heads", 1))


def _projected(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (b, c, steps) of channels x [1, n, heads, dim], float32 [1, n, heads, ...]."""
    sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
    if hasattr(module, "x_proj_weight"):
        made = torch.einsum("bnhd,hsd->bnhs", x, module.x_proj_weight)
        steps, b, c = torch.split(made, sizes, dim=-1)
        steps = torch.einsum("bnhr,hdr->bnhd", steps, module.dt_proj_weight)
        bias = module.dt_proj_bias
    else:
        steps, b, c = torch.split(module.x_proj(x), sizes, dim=-1)
        if hasattr(module, "dt_layernorm"):
            steps, b, c = module.dt_layernorm(steps), module.b_layernorm(b), module.c_layernorm(c)
        steps, bias = F.linear(steps, module.dt_proj.weight), module.dt_proj.bias
    return b.float(), c.float(), F.softplus(steps.float() + bias.float())


def _run(
    module: Any,
    queries: torch.Tensor,
    given: torch.Tensor,
    state: torch.Tensor | None,
    *,
    goes_on: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run chains of tokens (`running_states.Rule`).

    queries  [B, q, heads, state]: c
    state    [1, heads, dim, state]
    """
    del goes_on
    heads, inner = _num_heads(module), module.intermediate_size
    sizes = [inner, heads * module.ssm_state_size, inner]
    x, b, steps = (one.view(*one.shape[:2], heads, -1) for one in torch.split(given, sizes, dim=-1))
    rates = -module.A_log.float().exp().view(heads, -1, module.ssm_state_size)
    x, num_others = x * steps, given.shape[1] - queries.shape[1]
    if state is None:
        state = x.new_zeros(1, *rates.shape)
    made = []
    for at in range(given.shape[1]):
        added = x[:, at, :, :, None] * b[:, at, :, None]
        state = torch.addcmul(added, (steps[:, at, :, :, None] * rates).exp_(), state)
        if at >= num_others:
            made.append((state * queries[:, at - num_others, :, None]).sum(-1))
    shape = len(given), 0, heads, inner // heads
    return torch.stack(made, 1) if made else x.new_zeros(shape), state
