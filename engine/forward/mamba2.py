"""Mamba 2 (Bamba, Falcon H1, Granite 4, Codestral Mamba and others): one state, over slots.

    S_t = exp(s_t A) S_(t-1) + s_t x_t b_t'          y_t = S_t c_t + D x_t

What a token gives to the states behind it: x, b and its step s (in the paper: delta t). Heads have
an x and a step each, groups of heads share b and c. How a state comes of these: `decayed_sums.py`;
where it is kept: `running_states.py`.

The modules stay transformers'; where the cache is ours, their forward is this one. Passes of
several texts run one text after another. The limits of steps hold for every token, as where
transformers computes a whole text; where it computes one token at a time, it leaves them out, so
that its `generate` may differ from its own forward where steps reach them.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engine.forward.cache_tensors import ShapeCache, SlotCache
from engine.forward.decayed_sums import decayed_sums
from engine.forward.running_states import FLOAT32_BYTES, convolved, summed

CLASSES = (
    "BambaMixer",
    "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer",
    "Mamba2Mixer",
    "NemotronHMamba2Mixer",
    "Zamba2MambaMixer",
)
BESIDE_ATTENTION = True
CONVOLUTION = "conv1d"


def state_bytes(module: Any) -> int:
    """Return the bytes of one text's two states: [heads, dim, state] in float32 each."""
    return 2 * int(module.intermediate_size) * int(module.ssm_state_size) * FLOAT32_BYTES


def forward(
    module: Any, place: int, hidden_states: torch.Tensor, cache: SlotCache | ShapeCache
) -> torch.Tensor:
    """Return the layer's outputs [1, n, width] (`more_layers.Kind`)."""
    gate, entering, steps = _projected(module, hidden_states)
    inner, outer = _sizes(module)
    size = inner + outer + module.num_heads
    mixed = module.act(convolved(entering, module.conv1d, size, cache, place))
    x, b, c = torch.split(mixed.to(entering.dtype).float(), [inner, outer, outer], dim=-1)
    given = torch.cat((x, b, steps), dim=-1)
    queries = _by(c, module.n_groups)
    rows = summed(partial(_run, module), queries, given, entering, cache, place)
    rows = rows + module.D.float()[:, None] * _by(x, module.num_heads)
    made: torch.Tensor = module.out_proj(_gated(module, rows.flatten(2), gate))
    return made


def _by(rows: torch.Tensor, *counts: int) -> torch.Tensor:
    """Return rows [..., size] divided into so many parts, [..., *counts, size of a part]."""
    return rows.view(*rows.shape[:-1], *counts, -1)


def _sizes(module: Any) -> tuple[int, int]:
    """Return how many numbers the x of all heads have, and the b of all groups."""
    return module.intermediate_size, module.n_groups * module.ssm_state_size


def _projected(
    module: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (gates, x, b and c before the convolution, steps [1, n, heads] float32)."""
    if is_scaled := hasattr(module, "mup_vector"):  # Falcon H1's multipliers
        hidden = hidden * module.ssm_in_multiplier
    made = module.in_proj(hidden)
    if is_scaled:
        made = made * module.mup_vector
    sizes = [module.intermediate_size, module.conv_dim, module.num_heads]
    gate, entering, steps = torch.split(made, sizes, dim=-1)
    steps = F.softplus(steps.float() + module.dt_bias.float()).clamp(*module.time_step_limit)
    return gate, entering, steps


def _gated(module: Any, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return rows [1, n, width] float32 gated and mostly normed, in the type of `gate`."""
    if getattr(module, "mamba_rms_norm", True):
        made: torch.Tensor = module.norm(rows, gate)
        return made.to(gate.dtype)
    return (rows * F.silu(gate)).to(gate.dtype)


def _run(
    module: Any,
    queries: torch.Tensor,
    given: torch.Tensor,
    state: torch.Tensor | None,
    *,
    goes_on: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run chains of tokens (`running_states.Rule`).

    queries  [B, q, groups, state]: c
    state    [groups, heads of each, dim, state]
    """
    x, b, steps = torch.split(given, [*_sizes(module), module.num_heads], dim=-1)
    steps, b = _by(steps, module.n_groups), _by(b, module.n_groups)  # [B, n, g, h], [B, n, g, s]
    x = _by(x, *steps.shape[2:]) * steps[..., None]  # [B, n, g, h, d]
    decays = -module.A_log.double().exp().view(steps.shape[2:]) * steps
    return decayed_sums(queries, b, x, decays, state, goes_on=goes_on)
