"""Read the config.json of an EAGLE head, and the names of its tensors in each layout.

    EAGLE      fc, layers.0                     speculators: fusion_fc, transformer
    EAGLE-3    fc, midlayer, norm, lm_head      speculators: fc, layers.0, norm, lm_head

The EAGLE project writes all fields into config.json itself; vLLM's project `speculators` writes
those of the layer into `transformer_layer_config`. Reads no tensor.
"""

from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.checkpoint.files import Object, one_line
from engine.checkpoint.model import max_model_len
from engine.errors import ModelError
from engine.heads.stated import (
    EPSILON,
    POSITIONS,
    TargetSizes,
    count,
    draft_vocab,
    layer_config,
    refuse_odd_config,
    refuse_other_target,
)
from engine.heads.target import Target
from proto.head_kinds import HeadKind, feature_layers, reads_last_state

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The sizes of an EAGLE head, checked against its target.

    width        hidden size of the head
    dim          size of one attention head
    intermediate  inner size of the feed-forward block
    epsilon      epsilon of its norms
    output_is_normed  True: the next row starts from the normed output (`norm_output`, EAGLE 3.1)
    features_are_normed  True: each feature has a norm of its own (`fc_norm`, EAGLE 3.1)
    reads_last   True: features are states after the target's last norm, and are rows' states
                 without `fc`
    layers       target layers whose features (hidden states) the head reads: i stands for the input
                 of decoder layer i, -1 for the output of the last norm
    draft_vocab  number of tokens that it can draft
    residual_is_normed  True: the residual stream continues from the normed state (speculators'
                 `norm_before_residual`)
    max_model_len  number of positions that it can take
    rope         a transformers configuration that describes its rotary embedding
    """

    kind: HeadKind
    width: int
    num_heads: int
    num_kv_heads: int
    dim: int
    intermediate: int
    epsilon: float
    layers: tuple[int, ...]
    draft_vocab: int
    residual_is_normed: bool
    features_are_normed: bool
    output_is_normed: bool
    reads_last: bool
    max_model_len: int
    rope: Any


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a head's tensors in its layout: of the input matrix and of the layer."""

    fc: str
    layer: str


def names_of(tensors: Collection[str]) -> Names:
    """Return the layout's names, recognised by the names of a checkpoint's tensors."""
    layers = ("midlayer", "transformer", "layers.0")
    layer = next((x for x in layers if any(n.startswith(f"{x}.") for n in tensors)), layers[-1])
    return Names("fusion_fc" if "fusion_fc.weight" in tensors else "fc", layer)


def read_eagle_config(path: Path, stated: Object, kind: HeadKind, target: Target) -> EagleConfig:
    """Return an EAGLE head's sizes from its config.json, after checking them against the target.

    path    path of config.json, for messages
    stated  the content of config.json

    Raises:
        ModelError: a number is missing, or the head was made for another target or has a form that
            is not covered.
    """
    part = layer_config(path, stated)
    sizes = TargetSizes(target.name, target.vocab_size, target.hidden_size, target.num_layers)
    refuse_other_target(path, stated, kind, sizes)
    refuse_odd_config(path, stated, kind)
    width, num_heads = count(path, part, "hidden_size"), count(path, part, "num_attention_heads")
    num_kv_heads = count(path, part, "num_key_value_heads", num_heads)
    dim = count(path, part, "head_dim", width // num_heads or 1)
    rope = rotary_config(path, part, num_heads, dim)
    is_third = kind is HeadKind.EAGLE3
    longest = max_model_len(str(path), rope)
    is_bounded = rope.rope_parameters["rope_type"] in ("longrope", "dynamic")
    return EagleConfig(
        kind=kind,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dim=dim,
        intermediate=count(path, part, "intermediate_size"),
        epsilon=float(part.get("rms_norm_eps") or EPSILON),
        layers=feature_layers(kind, stated, target.num_layers),
        draft_vocab=draft_vocab(path, stated, target.vocab_size) if is_third else target.vocab_size,
        residual_is_normed=_residual_is_normed(path, stated, kind),
        features_are_normed=is_third and bool(stated.get("fc_norm")),
        output_is_normed=is_third and bool(stated.get("norm_output")),
        reads_last=is_third and reads_last_state(stated),
        # If only relative positions matter, it may draft beyond the length it was trained for, as
        # far as its target goes: the target verifies its drafts.
        max_model_len=min(target.max_model_len, longest) if is_bounded else target.max_model_len,
        rope=rope,
    )


def rotations(rope: Any, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the rotary embedding's tables [2, positions, 1, dim] in `dtype`, on the CPU.

    The first is the cosines, the second the sines, negative in their first half.

    rope  a transformers configuration (`EagleConfig.rope`)
    """
    made: Any = LlamaRotaryEmbedding(rope)
    cos, sin = made(torch.empty(0, dtype=dtype), torch.arange(num_positions)[None])
    first, second = sin[0].chunk(2, dim=-1)
    return torch.stack((cos[0], torch.cat((-first, second), dim=-1)))[:, :, None]


def _residual_is_normed(path: Path, stated: Object, kind: HeadKind) -> bool:
    """Return `EagleConfig.residual_is_normed`. Raises ModelError if speculators leaves it out."""
    if kind is HeadKind.EAGLE:
        return False
    found = stated.get("norm_before_residual")
    if found is None and "speculators_model_type" in stated:
        # Programs that read such files assume different defaults.
        raise ModelError(f"{path}: it does not say norm_before_residual; add it, true or false")
    return bool(found)


def rotary_config(path: Path, part: Object, num_heads: int, dim: int) -> Any:
    """Return a transformers configuration of the head's rotary embedding. Raises ModelError."""
    fields = {field: deepcopy(part[field]) for field in _ROPE if part.get(field) is not None}
    longest = count(path, part, "max_position_embeddings", POSITIONS)
    try:
        made = LlamaConfig(
            hidden_size=num_heads * dim,
            num_attention_heads=num_heads,
            head_dim=dim,
            max_position_embeddings=longest,
            **fields,
        )
        if rotations(made, 2, torch.float32).isfinite().all():
            return made
    except Exception as error:  # transformers computes with what it reads: any error is possible
        raise ModelError(
            f"{path}: its rotary embedding cannot be used: {one_line(error)}"
        ) from error
    raise ModelError(f"{path}: its rotary embedding cannot be used: it is not finite; correct it")
