"""Checks of a head's folder and config.json, made before any weight is read.

Needs no torch, because the coordinator makes these checks before it starts a node; the node makes
them again.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.files import (
    THETAS,
    Object,
    as_json,
    refuse_number,
    refuse_odd_dim,
    refuse_odd_file,
)
from engine.errors import ModelError
from proto.head_kinds import (
    MAX_LAYERS,
    HeadKind,
    dflash_part,
    feature_layers,
)

NO_HEAD = "it describes no head that is covered; use one of Medusa, EAGLE, EAGLE-3 or DFlash"
_FIX = "use a head made for this target"

# The file names that are tried, in this order: safe formats first.
_MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
WHOLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"

# Defaults of the llama family for fields that config.json leaves out.
EPSILON, POSITIONS = 1e-6, 2048
MOST_MEDUSA = 1024
USUAL_BLOCK, MOST_BLOCK = 16, 64  # tokens of a DFlash head's block
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of its layers
# Sizes that only DFlash's second version has: of its convolutions, and of its choice of a path.
SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_EPSILONS = (1e-12, 0.1)
_ROPES = ("rope_scaling", "rope_parameters")
# Type of rotary embedding -> the numbers that it needs; transformers has defaults for the others.
_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": (),
}


def head_file(folder: Path) -> Path:
    """Return the file of a head's tensors, or the index of several files.

    Raises:
        ModelError: the folder has no such file, or it is no ordinary file.
    """
    if (path := find_head_file(folder)) is None:
        raise ModelError(
            f"{folder}: no weights of a head; name them {WHOLE} or {PICKLED}, of Medusa "
            f"{_MEDUSA[0]} or {_MEDUSA[1]}"
        )
    refuse_odd_file(path)
    return path


def find_head_file(folder: Path) -> Path | None:
    """Return the file of a head's tensors, or the index of several files; None if there is none."""
    paths = (folder / name for name in (*_MEDUSA, WHOLE, INDEX, PICKLED))
    return next((path for path in paths if path.exists() or path.is_symlink()), None)


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """Sizes of a target that a head must fit, and its name for messages; a size may be unknown."""

    name: str
    vocab_size: int | None
    hidden_size: int | None
    num_layers: int | None


def refuse_other_target(path: Path, stated: Object, kind: HeadKind, target: TargetSizes) -> None:
    """Raise ModelError if a head was made for a target of other sizes.

    path    path of the head's config.json, for messages
    stated  the content of config.json
    """
    part = layer_config(path, stated)
    is_wider = kind is HeadKind.EAGLE3 and stated.get("target_hidden_size") is not None
    of, field = (stated, "target_hidden_size") if is_wider else (part, "hidden_size")
    sizes = ((part, "vocab_size", target.vocab_size), (of, field, target.hidden_size))
    for of, field, wanted in sizes:
        found = of.get(field)
        if found is not None and wanted is not None and found != wanted:
            raise ModelError(
                f"{path}: {field} is {as_json(found)}, but that of {target.name} is {wanted}; "
                f"{_FIX}"
            )
    num_layers = target.num_layers
    meant = stated.get("num_target_layers") if kind is HeadKind.DFLASH else None
    if None not in (meant, num_layers) and meant != num_layers:
        raise ModelError(
            f"{path}: num_target_layers is {as_json(meant)}, but {target.name} has {num_layers}; "
            f"{_FIX}"
        )
    if num_layers is not None and not feature_layers(kind, stated, num_layers):
        raise ModelError(
            f"{path}: it reads features of layers that {target.name}, which has {num_layers}, does "
            f"not have; {_FIX}"
        )


def refuse_odd_config(path: Path, stated: Object, kind: HeadKind) -> None:
    """Raise ModelError if a number that a head of this kind needs is missing or out of range.

    path    path of the head's config.json, for messages
    stated  the content of config.json
    """
    if kind is HeadKind.MEDUSA:
        medusa_counts(path, stated)
        return
    part = layer_config(path, stated)
    if kind is HeadKind.DFLASH:
        _refuse_odd_block(path, dflash_part(stated))
    else:
        _refuse_more_layers(path, part)
    _refuse_other_forms(path, part)
    width, num_heads = count(path, part, "hidden_size"), count(path, part, "num_attention_heads")
    num_kv_heads = count(path, part, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{path}: num_key_value_heads, {num_kv_heads}, does not divide num_attention_heads, "
            f"{num_heads}; one of them is wrong"
        )
    dim = count(path, part, "head_dim", width // num_heads or 1)
    of = "head_dim" if part.get("head_dim") else "hidden_size / num_attention_heads"
    refuse_odd_dim(path, of, dim)
    count(path, part, "intermediate_size")
    count(path, part, "max_position_embeddings", POSITIONS)
    refuse_number(path, part, "rms_norm_eps", _EPSILONS)
    _refuse_rope(path, part)
    if kind is HeadKind.EAGLE3:
        _refuse_odd_third(path, stated, part)


# Fields of an EAGLE-3 head that are true or false: which norms it has, and where.
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _refuse_odd_third(path: Path, stated: Object, part: Object) -> None:
    """Raise ModelError if an EAGLE-3 head is of a form that is not covered, or says odd things."""
    if stated.get("parallel_drafting") or stated.get("speculators_model_type") == "peagle":
        raise ModelError(
            f"{path}: heads that draft in parallel (P-EAGLE) are not covered; use another head"
        )
    if part.get("kv_lora_rank") is not None:
        raise ModelError(
            f"{path}: heads with multi-head latent attention are not covered; use another head"
        )
    draft_vocab(path, stated, 1)
    for field in SWITCHES:
        if not isinstance(found := stated.get(field), bool | None):
            raise ModelError(f"{path}: {field} is {as_json(found)}; it must be true or false")
    if stated.get("norm_before_fc") and stated.get("fc_norm"):
        raise ModelError(
            f"{path}: norm_before_fc and fc_norm are both true, but a head has one of them; set "
            "one to false"
        )


def draft_vocab(path: Path, stated: Object, vocab_size: int) -> int:
    """Return how many tokens a head can draft; `vocab_size` if it states none, or 0.

    Raises:
        ModelError: the field is no such number.
    """
    most = (1 << 31) - 1
    return in_range(path, stated, "draft_vocab_size", vocab_size, (0, most)) or vocab_size


def medusa_counts(path: Path, stated: Object) -> tuple[int, int]:
    """Return (number of Medusa heads, layers of each) from config.json.

    Raises:
        ModelError: a number is out of range.
    """
    num_heads = in_range(path, stated, "medusa_num_heads", 1, (1, MOST_MEDUSA))
    return num_heads, in_range(path, stated, "medusa_num_layers", 1, (0, MOST_MEDUSA))


def layer_config(path: Path, stated: Object) -> Object:
    """Return the part of config.json that describes the head's layer. Raises ModelError."""
    part = stated.get("transformer_layer_config", stated)
    if not isinstance(part, dict):
        raise ModelError(f"{path}: transformer_layer_config must be an object; get it again")
    return part


def count(path: Path, part: Mapping[str, object], field: str, default: int | None = None) -> int:
    """Return a field's whole number, 1 or more; `default` if it is absent.

    Raises:
        ModelError: the field is something else, or absent without a default.
    """
    return in_range(path, part, field, default, (1, (1 << 31) - 1))


def in_range(
    path: Path,
    part: Mapping[str, object],
    field: str,
    default: int | None,
    between: tuple[int, int],
) -> int:
    """Return a field's whole number, or `default`. Raises ModelError if not in `between`."""
    found, (least, most) = part.get(field), between
    if found is None:
        found = default
    if type(found) is not int or not least <= found <= most:
        to = "on" if most == (1 << 31) - 1 else f"to {most}"
        raise ModelError(
            f"{path}: {field} is {as_json(part.get(field))}; it must be a whole number from "
            f"{least} {to}"
        )
    return found


def _refuse_more_layers(path: Path, part: Object) -> None:
    """Raise ModelError if an EAGLE head has several layers."""
    num_layers = count(path, part, "num_hidden_layers", 1)
    if num_layers != 1:
        raise ModelError(f"{path}: the head has {num_layers} layers; use one with a single layer")


def _refuse_odd_block(path: Path, part: Mapping[str, object]) -> None:
    """Raise ModelError if what config.json says of a DFlash head's block is missing or odd."""
    num_layers = in_range(path, part, "num_hidden_layers", 1, (1, MOST_BLOCK))
    in_range(path, part, "block_size", USUAL_BLOCK, (2, MOST_BLOCK))
    in_range(path, part, "mask_token_id", None, (0, (1 << 31) - 1))
    if part.get("sample_from_anchor"):
        raise ModelError(
            f"{path}: heads that sample from the anchor (sample_from_anchor) are not covered; use "
            "another head"
        )
    count(path, part, "draft_vocab_size", 1)
    read = part.get("target_layer_ids")
    if isinstance(read, list) and len(read) > MAX_LAYERS:
        raise ModelError(
            f"{path}: it reads features of {len(read)} layers, and at most {MAX_LAYERS} are sent; "
            "use another head"
        )
    kinds = part.get("layer_types") or [FULL] * num_layers
    are_known = isinstance(kinds, list) and all(one in (FULL, SLIDING) for one in kinds)
    if not isinstance(kinds, list) or not are_known or len(kinds) != num_layers:
        raise ModelError(
            f"{path}: layer_types is {as_json(kinds)}; it must name each of its {num_layers} "
            f"layers {FULL} or {SLIDING}"
        )
    if SLIDING in kinds:
        in_range(path, part, "sliding_window", None, (1, (1 << 31) - 1))
    if any(part.get(field) is not None for field in SECOND):
        for field in SECOND:
            in_range(path, part, field, None, (1, (1 << 31) - 1))


def _refuse_other_forms(path: Path, part: Object) -> None:
    """Raise ModelError if a head's layers have a form that is not covered."""
    if part.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"{path}: hidden_act is {as_json(part['hidden_act'])}; only heads with silu are covered"
        )
    for stated in (part, *(rope for _, rope in _ropes(part))):
        if stated.get("partial_rotary_factor", 1) != 1:
            raise ModelError(f"{path}: partial_rotary_factor is not covered; use another head")


def _refuse_rope(path: Path, part: Object) -> None:
    """Raise ModelError if a rotary embedding's settings are missing or out of range."""
    refuse_number(path, part, "rope_theta", THETAS)
    for field in _ROPES:
        if part.get(field) is not None and not isinstance(part[field], dict):
            raise ModelError(
                f"{path}: its rotary embedding cannot be used: {field} is {as_json(part[field])}, "
                "and it must be an object"
            )
    for field, rope in _ropes(part):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if not isinstance(kind, str) or kind not in _NUMBERS:
            raise ModelError(
                f"{path}: its rotary embedding cannot be used: rope_type is {as_json(kind)} in "
                f"{field}; there are {', '.join(_NUMBERS)}"
            )
        refuse_number(path, rope, "rope_theta", THETAS)
        for number in _NUMBERS[kind]:
            found = rope.get(number)
            if number == "original_max_position_embeddings":
                found = found or part.get(number)
            is_number = isinstance(found, int | float) and not isinstance(found, bool)
            if not is_number or not 0 < float(found or 0) < math.inf:
                raise ModelError(
                    f"{path}: its rotary embedding cannot be used: {number} is {as_json(found)} in "
                    f"{field}, and {kind} needs a number above 0"
                )


def _ropes(part: Object) -> Iterator[tuple[str, Object]]:
    """Yield (field, object) of each object that describes the rotary embedding."""
    for field in _ROPES:
        if isinstance(rope := part.get(field), dict) and rope:
            yield field, rope
