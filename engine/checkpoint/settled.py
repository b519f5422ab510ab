"""Change a loaded model so that a token is read in the same way whatever the length of its text.

Transformers has models that look at the length of a pass or of the cache. Here a pass has rows of
several texts and of a tree, so a token may depend on its position alone. Reads no checkpoint.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.checkpoint import long_texts


def settle(model: Any, config: Any, longest: int) -> None:
    """Settle the factors of a longrope and, in a Llama 4, the scale of each query.

    config   transformers' configuration of the language model
    longest  number of tokens that a text may have, from `long_texts.limited`: it says which of a
             longrope's two sets of factors is taken
    """
    if config.model_type == "llama4_text" and config.attn_temperature_tuning:
        for layer in model.model.layers:
            if not layer.self_attn.use_rope:
                _scale_by_position(layer)
    stated = config.to_dict()
    original = long_texts.original_length(stated)
    if original is None or not long_texts.has_sets(str(config.model_type), stated):
        return
    for part in model.modules():
        if getattr(part, "rope_type", None) not in long_texts.LONG_ROPES:
            continue
        if longest > original:
            frequencies, _ = ROPE_INIT_FUNCTIONS[part.rope_type](
                part.config, part.inv_freq.device, seq_len=original + 1
            )
            part.inv_freq.copy_(frequencies)
        part.rope_type = "default"  # transformers now leaves the factors as they are


def _scale_by_position(layer: Any) -> None:
    """Scale the queries of a Llama 4's layer by the positions of their tokens.

    Transformers counts from the number of cached tokens on instead. The scale is that of its
    `Llama4TextAttention`: log(1 + floor((position + 1) / floor_scale)) * attn_scale + 1.
    """
    attention = layer.self_attn
    attention.attn_temperature_tuning = False
    positions: list[torch.Tensor] = []

    def note(_layer: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        del args
        positions[:] = [kwargs["position_ids"]]

    def scaled(_projection: object, _inputs: object, queries: torch.Tensor) -> torch.Tensor:
        steps = torch.floor((positions[0].float() + 1.0) / attention.floor_scale)
        scales: torch.Tensor = torch.log1p(steps) * attention.attn_scale + 1.0
        return (queries * scales[..., None]).to(queries.dtype)

    layer.register_forward_pre_hook(note, with_kwargs=True)
    attention.q_proj.register_forward_hook(scaled)
