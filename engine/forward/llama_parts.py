"""What the fused backend takes from a model of the llama family."""

from collections.abc import Sequence
from dataclasses import dataclass
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


# -- norms -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The weights of a layer's norms, for the merged operators.

    heads       [heads + 2 kv_heads, dim]: of queries and keys, ones for values; None but for qwen3
    before_mlp  [hidden]: of the norm before the feed-forward block
    after       [hidden]: of the norm after the layer: the next layer's first, or the model's last
    """

    heads: torch.Tensor | None
    before_mlp: torch.Tensor
    after: torch.Tensor


def head_weights(attention: Any, num_heads: int, num_kv_heads: int) -> torch.Tensor | None:
    """Return the weights [heads + kv_heads, dim] of the norms of queries and keys, or None."""
    if not hasattr(attention, "q_norm"):
        return None
    q, k = attention.q_norm.weight, attention.k_norm.weight
    return torch.cat([q.expand(num_heads, -1), k.expand(num_kv_heads, -1)]).detach()


def norm_weights(
    modules: Sequence[Any], last: Any, num_heads: int, num_kv_heads: int
) -> list[NormWeights]:
    """Return the weights of the norms of each layer; `last` is the model's last norm."""
    after = [*(module.input_layernorm for module in modules[1:]), last]
    found = []
    for module, norm in zip(modules, after, strict=True):
        heads = head_weights(module.self_attn, num_heads, num_kv_heads)
        if heads is not None:
            heads = torch.cat((heads, heads.new_ones(num_kv_heads, heads.shape[1])))
        before_mlp = module.post_attention_layernorm.weight.detach()
        found.append(NormWeights(heads, before_mlp, norm.weight.detach()))
    return found


def epsilon_of_norms(modules: Sequence[Any], last: Any) -> float | None:
    """Return the epsilon of all norms of these layers and the last one; None: they differ."""
    norms = [last]
    for module in modules:
        attention = module.self_attn
        norms += [module.input_layernorm, module.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    epsilons = {float(norm.variance_epsilon) for norm in norms}
    return epsilons.pop() if len(epsilons) == 1 else None
