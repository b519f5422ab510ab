"""The kinds of heads (small models that draft from their target's hidden states), and how to tell.

    Medusa    several heads; the i-th predicts the token i places further on (arXiv 2401.10774)
    EAGLE     a decoder layer that predicts the target's next feature, which is a hidden state of
              the target (2401.15077, 2406.16858)
    EAGLE-3   the same with features of three layers, and a vocabulary of its own (2503.01840)
    MTP       a layer for multi-token prediction that the target's own checkpoint has (2412.19437);
              it has no folder, so its name is the word `mtp`
    DFlash    some layers that draft a block of tokens at once, from features of several layers of
              the target (2602.06036)

Owns the names of the kinds. What a head computes is in `engine/heads`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from proto.errors import ModelError


class HeadKind(StrEnum):
    """The kind of a head: it determines how the head drafts, and from which features."""

    MEDUSA = "medusa"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    DFLASH = "dflash"


MAX_LAYERS = 8  # layers of the target whose features a head may read

# In the place of a head's folder: the layer for drafting in the target's own checkpoint.
MTP = HeadKind.MTP.value
_NUM_MTP = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
# Model types whose config.json need not state a number: it is 1, or the files tell.
_NOT_STATED = ("mimo_v2_flash", "qwen3_next")
# Model types whose files have `mtp.` before all tensors of the layer, also in a model of several
# modalities.
_ALONE = ("exaone_moe", "mellum", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
# Model types whose files have `model.mtp.layers.`, with numbers from 0.
_APART = ("mimo_v2_flash",)
# Model types whose layers for drafting are not of the same form as their own.
_UNREAD = ("ernie4_5_moe", "longcat_flash")
# The families (`model_type`) of targets of which such layers were tried.
MTP_FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "hy_v3", *_ALONE, *_APART)

# The first matrix of such a layer behind its prefix, and in the other layouts. In quantised
# checkpoints the ends of the names differ.
JOINED, JOINED_ALONE, JOINED_APART = "eh_proj.", "mtp.fc.", "mtp.layers.0.eh_proj."


def is_mtp(name: str) -> bool:
    """True if a name means the layer in the target's own checkpoint; a folder is `./mtp`."""
    return name == MTP


def no_mtp(target: str) -> str:
    """Return the line that refuses a target without such a layer."""
    return f"{target}: its checkpoint has no layer for multi-token prediction; name another drafter"


def is_mtp_apart(config: Mapping[str, object]) -> bool:
    """True if a target's files have `model.mtp.layers.` before the names of such layers."""
    return config.get("model_type") in _APART


def num_mtp_layers(config: Mapping[str, object]) -> int:
    """Return how many layers for multi-token prediction a target's configuration states."""
    stated = [number for field in _NUM_MTP if (number := config.get(field)) is not None]
    if not stated and config.get("model_type") in _NOT_STATED:
        return 1
    return next((number for number in stated if type(number) is int and number > 0), 0)


def refuse_mtp(target: str, config: Mapping[str, object], *, is_wrapped: bool) -> None:
    """Raise ModelError if a target has no such layer by its configuration, or one that is not read.

    config      the part of config.json that describes the language model
    is_wrapped  True if that is the language model in a model of several modalities
    """
    if config.get("model_type") in _UNREAD:
        raise ModelError(
            f"{target}: {MTP} is not read of the type {config['model_type']}, whose layer for it "
            "has a form of its own; name another drafter"
        )
    if not num_mtp_layers(config):
        raise ModelError(no_mtp(target))
    if is_wrapped and config.get("model_type") not in _ALONE:
        raise ModelError(
            f"{target}: {MTP} is not read of a model of several modalities of this type; name "
            "another drafter"
        )
    if config.get("mtp_use_dedicated_embeddings"):
        raise ModelError(
            f"{target}: {MTP} with its own embeddings (mtp_use_dedicated_embeddings) is not read; "
            "name another drafter"
        )


# Other models are called Eagle too (Eagle2_5_VLForConditionalGeneration), so the whole name counts.
_EAGLE3 = re.compile(r"Eagle3\w*(ForCausalLM|Speculator|DraftModel)|\w+ForCausalLMEagle3")
_EAGLE = re.compile(r"Eagle(?!\d)\w*(ForCausalLM|Speculator|DraftModel)|\w+ForCausalLMEagle")
_DFLASH = re.compile(r"DFlash2?(DraftModel|ForCausalLM|Speculator)?")
# What vLLM's project `speculators` calls them.
_SPECULATORS = {
    "eagle": HeadKind.EAGLE,
    "eagle3": HeadKind.EAGLE3,
    "peagle": HeadKind.EAGLE3,  # refused in one line (`engine/heads/stated.py`)
    "dflash": HeadKind.DFLASH,
    "dflash2": HeadKind.DFLASH,
}
_MEDUSA_TENSOR = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.linear\.weight")
_EAGLE_TENSOR = re.compile(r"(model\.)?(fc|fusion_fc)\.weight")
# A Llama of one layer has norms where the first heads of EAGLE have none.
_LAYER_TENSOR = re.compile(r"(model\.)?layers\.0\.self_attn\.q_proj\.weight")
_LLAMA_TENSOR = re.compile(r"(model\.)?(layers\.0\.input_layernorm|norm|lm_head)\.weight")
_EAGLE3_TENSOR = re.compile(r"(model\.)?(d2t|(midlayer|layers\.0)\.hidden_norm\.weight)")


def refuse_head(name: str, kind: HeadKind | None) -> None:
    """Raise ModelError if a model that should be a whole one is a head (`kind` is not None)."""
    if kind is not None:
        raise ModelError(
            f"{name} is a head of the kind {kind}: it drafts for one model; give that as the "
            "target, this as the drafter"
        )


def head_kind(config: Mapping[str, object]) -> HeadKind | None:
    """Return the kind of head that config.json describes; None: no head, or it does not tell.

    None: it describes no head, or config.json alone does not tell. The config of EAGLE's first
    checkpoints is that of a Llama with one layer; `head_kind_of_tensors` recognises those.
    """
    speculators = config.get("speculators_model_type")
    if speculators is not None:
        return _SPECULATORS.get(str(speculators))
    if "medusa_num_heads" in config:
        return HeadKind.MEDUSA
    stated = config.get("architectures")
    names = [str(name) for name in stated] if isinstance(stated, list) else []
    if "dflash_config" in config or any(map(_DFLASH.fullmatch, names)):
        return HeadKind.DFLASH
    if "draft_vocab_size" in config or any(map(_EAGLE3.fullmatch, names)):
        return HeadKind.EAGLE3
    return HeadKind.EAGLE if any(map(_EAGLE.fullmatch, names)) else None


def kind_of_files(
    config: Mapping[str, object], names: Callable[[], Iterable[str]]
) -> HeadKind | None:
    """Return the kind of the head in a checkpoint's files; None: they are of a whole model.

    config  the content of config.json
    names   returns the names of the tensors; called only where config.json does not tell
    """
    kind = head_kind(config)
    if kind is None and config.get("num_hidden_layers") == 1:  # as EAGLE's first ones have it
        return head_kind_of_tensors(names())
    return kind


def head_kind_of_tensors(names: Iterable[str]) -> HeadKind | None:
    """Return the kind of the head whose tensors have these names; None if they are of no head.

    A head that lacks its first matrix is recognised all the same: the error is raised on loading.
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


def dflash_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return a DFlash head's configuration as one object, under the names of z-lab's files.

    There it is config.json and `dflash_config` in it; in those of `speculators` config.json and
    `transformer_layer_config`, and layers are counted by their inputs.
    """
    inner, layer = config.get("dflash_config"), config.get("transformer_layer_config")
    if isinstance(inner, Mapping):
        return {"is_causal": inner.get("causal"), **config, **inner}
    if not isinstance(layer, Mapping):
        return config
    inputs = config.get("aux_hidden_state_layer_ids")
    if isinstance(inputs, list):
        inputs = [i - 1 if type(i) is int else i for i in inputs]
    is_causal = False if config.get("sliding_window_non_causal") is True else None
    return {**layer, **config, "target_layer_ids": inputs, "is_causal": is_causal}


def reads_last_state(config: Mapping[str, object]) -> bool:
    """True if an EAGLE-3 head reads the target's last state, as EAGLE does (NVIDIA's files)."""
    inner = config.get("eagle_config")
    return isinstance(inner, Mapping) and inner.get("use_aux_hidden_state") is False


def feature_layers(
    kind: HeadKind, config: Mapping[str, object], num_layers: int
) -> tuple[int, ...]:
    """Return the layers of the target (of `num_layers`) whose features a head of this kind reads.

    i is the input of decoder layer i, -1 the state after the last norm. A list in config.json
    itself is read with this meaning, as vLLM does. A list in `eagle_config` is read so too, except
    where it begins with 1: then its numbers mean the *output* of a layer, as SGLang reads it
    (sgl-project/sglang#25454), because nobody takes the input of the second layer for the lowest
    feature. An EAGLE-3 head may read the state after the last norm alone (`reads_last_state`).
    DFlash's numbers mean outputs of layers, of the last one the state after the last norm.

    Returns () if config.json has no valid list, or the target is too small.
    """
    if kind is HeadKind.DFLASH:
        outputs = dflash_part(config).get("target_layer_ids")
        if not isinstance(outputs, list) or not all(type(i) is int for i in outputs):
            return ()
        if len(set(outputs)) < len(outputs) or not all(0 <= i < num_layers for i in outputs):
            return ()
        return tuple(-1 if i == num_layers - 1 else i + 1 for i in outputs)
    if kind is not HeadKind.EAGLE3 or reads_last_state(config):
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
