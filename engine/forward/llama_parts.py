"""What the fused backend takes from a model of the llama family."""

from typing import Any

import torch

from engine.checkpoint.families import FUSED
from engine.checkpoint.model import LoadedModel
from engine.forward.linears import Linear
from engine.quantised.linear import QuantisedLinear


def why_not_fused(model: Any) -> str | None:
    """Return what this backend lacks to run `model`, worded to follow "has no", or None."""
    config = model.config
    if config.model_type not in FUSED:
        return f"forward for {config.model_type}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"{config.hidden_act} activation"
    linears = [part for part in model.modules() if isinstance(part, Linear)]
    expected = 7 * len(model.model.layers) + 1
    kinds = (torch.nn.Linear, QuantisedLinear)
    if len(linears) != expected or any(type(part) not in kinds for part in linears):
        return "forward for linear layers of other kinds (quantised, adapted)"
    plain = [part for part in linears if isinstance(part, torch.nn.Linear)]
    if any(part.weight.dtype != model.dtype for part in plain):
        return "forward for weights of several types"
    return None


def qkv_of(module: Any) -> list[Linear]:
    """Return a layer's query, key and value projections, in the order of their joined outputs."""
    attention = module.self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def rotations(model: Any, num_positions: int, loaded: LoadedModel) -> torch.Tensor:
    """Return the rotary embedding's tables [2, positions, 1, dim], in the model's dtype.

    The first is the cosines, the second the sines, negative in their first half. They come from the
    model's own rotary embedding, whatever its scaling.
    """
    positions = torch.arange(num_positions, device=loaded.device)
    with torch.inference_mode():
        one = torch.empty(0, dtype=loaded.dtype, device=loaded.device)
        cos, sin = model.rotary_emb(one, position_ids=positions[None])
        first, second = sin.chunk(2, dim=-1)
        return torch.stack((cos[0], torch.cat((-first, second), dim=-1)[0]))[:, :, None]
