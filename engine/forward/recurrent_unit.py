"""Gated linear recurrent units (RecurrentGemma): a state of one number a channel, over slots.

    h_t = a_t h_(t-1) + x_t

What a token gives to the states behind it: x and the logarithm of a. The first token of a text has
an x of another size, so the layer asks the cache for the positions of rows. Tokens are added one
after another, as in Mamba 1 (`mamba1.py`).

The modules stay transformers'; where the cache is ours, their forward is this one. Passes of
several texts run one text after another.
"""

from typing import Any

import torch
import torch.nn.functional as F

from engine.forward.cache_tensors import ShapeCache, SlotCache
from engine.forward.running_states import FLOAT32_BYTES, convolved, summed

CLASSES = ("RecurrentGemmaRecurrentBlock",)
BESIDE_ATTENTION = False
CONVOLUTION = "conv_1d"
_SHARPNESS = 8.0  # transformers has the same number in its code


def state_bytes(module: Any) -> int:
    """Return the bytes of one text's two states: one float32 a channel each."""
    return 2 * int(module.lru_width) * FLOAT32_BYTES


def forward(
    module: Any, place: int, hidden_states: torch.Tensor, cache: SlotCache | ShapeCache
) -> tuple[torch.Tensor, None]:
    """Return the layer's outputs [1, n, width] (`more_layers.Kind`), and no weights."""
    gate, entering = module.act_fn(module.linear_y(hidden_states)), module.linear_x(hidden_states)
    mixed = convolved(entering, module.conv_1d, 2 * module.lru_width, cache, place)
    mixed = mixed.to(entering.dtype)
    unit = module.rg_lru
    opening = _gate(unit, mixed, unit.input_gate_weight, unit.input_gate_bias)
    forgetting = _gate(unit, mixed, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    decays = -_SHARPNESS * forgetting.float() * F.softplus(unit.recurrent_param.float())
    sizes = (1 - (2 * decays).exp()).sqrt()
    if isinstance(cache, SlotCache):
        sizes = sizes.masked_fill((cache.positions == 0)[None, :, None], 1.0)
    given = torch.cat(((mixed * opening).float() * sizes, decays), dim=-1)
    nothing = given[..., :0]  # outputs are the states themselves
    rows = summed(_run, nothing, given, entering, cache, place)
    return module.linear_out(rows[:, :, 0].to(gate.dtype) * gate), None


def _gate(unit: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return a gate of each channel, [1, n, width]: a linear layer for each head."""
    by_head = rows.view(*rows.shape[:2], unit.num_attention_heads, -1)
    made = torch.einsum("bnhd,hde->bnhe", by_head, weight) + bias
    return made.flatten(2).sigmoid()


def _run(
    queries: torch.Tensor, given: torch.Tensor, state: torch.Tensor | None, *, goes_on: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run chains of tokens (`running_states.Rule`).

    queries  [B, q, 0]
    state    [1, width]
    """
    del goes_on
    x, decays = given.chunk(2, dim=-1)
    kept, num_others = decays.exp(), given.shape[1] - queries.shape[1]
    if state is None:
        state = x.new_zeros(1, x.shape[-1])
    made = []
    for at in range(given.shape[1]):
        state = torch.addcmul(x[:, at], kept[:, at], state)
        made.append(state)
    rows = torch.stack(made[num_others:], 1) if queries.shape[1] else x[:, :0]
    return rows[:, :, None], state
