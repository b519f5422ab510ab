"""What the config.json of an EAGLE head states, and what its tensors are called in each layout.

    EAGLE      fc, layers.0                     speculators: fusion_fc, transformer
    EAGLE-3    fc, midlayer, norm, lm_head      speculators: fc, layers.0, norm, lm_head

What the project of EAGLE writes has its fields in config.json itself, what vLLM's project
`speculators` writes has those of the layer in `transformer_layer_config`. Reads no tensor.
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
    layer_config,
    refuse_odd_config,
    refuse_other_target,
)
from engine.heads.target import Target
from proto.head_kinds import HeadKind, feature_layers

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The sizes of an EAGLE head, held to its target.

    width        of the head's own states
    layers       of the target, whose features it is given: i is what enters decoder layer i
    draft_vocab  tokens that it can draft
    residual_is_normed  the state goes on as its norm has made it (speculators'
                 `norm_before_residual`)
    max_model_len  positions that it can take
    rope         what transformers needs to know of its rotary embedding
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
    max_model_len: int
    rope: Any


@dataclass(frozen=True, slots=True)
class Names:
    """How a layout calls its parts."""

    fc: str
    layer: str


def names_of(tensors: Collection[str]) -> Names:
    """Return what a checkpoint with tensors of these names calls its parts."""
    layers = ("midlayer", "transformer", "layers.0")
    layer = next((x for x in layers if any(n.startswith(f"{x}.") for n in tensors)), layers[-1])
    return Names("fusion_fc" if "fusion_fc.weight" in tensors else "fc", layer)


def read_eagle_config(path: Path, stated: Object, kind: HeadKind, target: Target) -> EagleConfig:
    """Return what config.json says, held to the target.

    path    of config.json, for messages
    stated  what it holds

    Raises:
        ModelError: it lacks a number, or is of another target's head, or of one of another form.
    """
    part = layer_config(path, stated)
    sizes = TargetSizes(target.name, target.vocab_size, target.hidden_size, target.num_layers)
    refuse_other_target(path, stated, kind, sizes)
    refuse_odd_config(path, stated, kind)
    width, num_heads = count(path, part, "hidden_size"), count(path, part, "num_attention_heads")
    num_kv_heads = count(path, part, "num_key_value_heads", num_heads)
    dim = count(path, part, "head_dim", width // num_heads or 1)
    rope = _rope(path, part, num_heads, dim)
    draft_vocab = target.vocab_size
    if kind is HeadKind.EAGLE3:
        draft_vocab = count(path, stated, "draft_vocab_size", draft_vocab)
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
        draft_vocab=draft_vocab,
        residual_is_normed=_residual_is_normed(path, stated, kind),
        # Where positions are only relative it may go on behind what it was trained for, as far
        # as its target goes: its drafts are verified.
        max_model_len=min(target.max_model_len, longest) if is_bounded else target.max_model_len,
        rope=rope,
    )


def rotations(rope: Any, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [2, positions, 1, dim]: cosines, and sines that are negative in their first half."""
    made: Any = LlamaRotaryEmbedding(rope)
    cos, sin = made(torch.empty(0, dtype=dtype), torch.arange(num_positions)[None])
    first, second = sin[0].chunk(2, dim=-1)
    return torch.stack((cos[0], torch.cat((-first, second), dim=-1)))[:, :, None]


def _residual_is_normed(path: Path, stated: Object, kind: HeadKind) -> bool:
    if kind is HeadKind.EAGLE:
        return False
    found = stated.get("norm_before_residual")
    if found is None and "speculators_model_type" in stated:
        # Its readers differ in what they take for granted.
        raise ModelError(f"{path}: it does not say norm_before_residual; add it, true or false")
    return bool(found)


def _rope(path: Path, part: Object, num_heads: int, dim: int) -> Any:
    """Return a configuration that transformers makes a rotary embedding of."""
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
    except Exception as error:  # it computes with what it finds, so anything may come of it
        raise ModelError(
            f"{path}: its rotary embedding cannot be used: {one_line(error)}"
        ) from error
    raise ModelError(f"{path}: its rotary embedding cannot be used: it is not finite; correct it")
