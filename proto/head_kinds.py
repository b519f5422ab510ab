"""Heads: small models that draft from what their target has computed, and how they are recognised.

    Medusa    some heads, each of which says what comes so many tokens later (arXiv 2401.10774)
    EAGLE     a decoder layer that predicts the target's next feature (2401.15077, 2406.16858)
    EAGLE-3   the same of features of three layers, with a vocabulary of its own (2503.01840)

Owns the names of the kinds. What a head computes is the engine's (`engine/heads`).
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum


class HeadKind(StrEnum):
    """What a head is: how it drafts, and of which features."""

    MEDUSA = "medusa"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"


# Other models are called Eagle too (Eagle2_5_VLForConditionalGeneration), so the whole name counts.
_EAGLE3 = re.compile(r"Eagle3\w*(ForCausalLM|Speculator|DraftModel)|\w+ForCausalLMEagle3")
_EAGLE = re.compile(r"Eagle(?!\d)\w*(ForCausalLM|Speculator|DraftModel)|\w+ForCausalLMEagle")
_MEDUSA_TENSOR = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.linear\.weight")
_EAGLE_TENSOR = re.compile(r"(model\.)?(fc|fusion_fc)\.weight")
# A Llama of one layer has norms where the first heads of EAGLE have none.
_LAYER_TENSOR = re.compile(r"(model\.)?layers\.0\.self_attn\.q_proj\.weight")
_LLAMA_TENSOR = re.compile(r"(model\.)?(layers\.0\.input_layernorm|norm|lm_head)\.weight")
_EAGLE3_TENSOR = re.compile(r"(model\.)?(d2t|(midlayer|layers\.0)\.hidden_norm\.weight)")


def head_kind(config: Mapping[str, object]) -> HeadKind | None:
    """Return of which kind the head is that a parsed config.json describes.

    None: of none, or config.json alone does not tell. Of EAGLE's first checkpoints it is that of a
    Llama with one layer; `head_kind_of_tensors` tells those.
    """
    speculators = config.get("speculators_model_type")
    if speculators is not None:
        return {"eagle": HeadKind.EAGLE, "eagle3": HeadKind.EAGLE3}.get(str(speculators))
    if "medusa_num_heads" in config:
        return HeadKind.MEDUSA
    stated = config.get("architectures")
    names = [str(name) for name in stated] if isinstance(stated, list) else []
    if "draft_vocab_size" in config or any(map(_EAGLE3.fullmatch, names)):
        return HeadKind.EAGLE3
    return HeadKind.EAGLE if any(map(_EAGLE.fullmatch, names)) else None


def head_kind_of_tensors(names: Iterable[str]) -> HeadKind | None:
    """Return of which kind the head is whose tensors have these names; None: of none.

    One that lacks its first matrix is a head all the same: whoever loads it says what is missing.
    """
    names = tuple(names)

    def has(pattern: re.Pattern[str]) -> bool:
        return any(map(pattern.fullmatch, names))

    if has(_MEDUSA_TENSOR):
        return HeadKind.MEDUSA
    if has(_EAGLE3_TENSOR):
        return HeadKind.EAGLE3
    is_first = has(_EAGLE_TENSOR) or (has(_LAYER_TENSOR) and not has(_LLAMA_TENSOR))
    return HeadKind.EAGLE if is_first else None


def feature_layers(
    kind: HeadKind, config: Mapping[str, object], num_layers: int
) -> tuple[int, ...]:
    """Return of which layers of its target, which has `num_layers`, a head reads the features.

    i is what enters decoder layer i, -1 the state after the last norm. What stands in config.json
    itself is counted so, as vLLM reads it; in `eagle_config` too, but where it begins with 1 it is
    what leaves a layer, as SGLang reads it (sgl-project/sglang#25454): nobody takes what enters the
    second layer for the lowest feature. Empty: what stands there is no such list, or the target is
    too small.
    """
    if kind is not HeadKind.EAGLE3:
        return (-1,)
    field, inner = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config")
    ids = config.get(field)
    if not ids and isinstance(inner, Mapping):
        ids = inner.get(field)
        if isinstance(ids, list) and ids and ids[0] == 1:
            ids = [i + 1 if type(i) is int else i for i in ids]
    if not ids:
        ids = [2, num_layers // 2, num_layers - 3]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < num_layers for i in ids):
        return ()
    return tuple(ids)
