"""What a model keeps of each token of a text and of each text, by its config.json alone.

The nodes learn it by running one token (`forward/cache_tensors.py`); this is the same without
torch, for an account of memory before anything is loaded. It knows attention (also of latents),
short convolutions, the gated delta rule and Mamba 2. Of a few families it is an estimate
(`ESTIMATED`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.files import LAYER_COUNTS
from engine.tensor_parallel.layout import shares

_NOTHING = ("mlp", "moe")  # layers that are a feed-forward block alone
_LINEAR = ("linear_attention", "mamba", "mamba2", "hybrid")
_FLOAT32_BYTES = 4
_STATES_OF_A_TEXT = 2  # of each layer: behind the committed tokens, and at the last border
_ONE_KEY_HEAD = ("falcon", "gpt_bigcode")  # unless config.json says otherwise
# Families with sizes of attention that are not known here: the account of these is an estimate.
ESTIMATED = (
    *("bailing_hybrid", "falcon_mamba", "gemma4_text", "gemma4_unified_text", "jamba", "jetmoe"),
    *("kimi_linear", "longcat_flash", "mamba", "mamba2", "mimo_v2_flash", "minimax"),
    *("recurrent_gemma", "zamba", "zamba2"),
)


@dataclass(frozen=True, slots=True)
class Kept:
    """What one process keeps.

    numbers  of each token, in the model's number type
    floats   of each token, in float32
    state    bytes of each text's running states, in float32
    """

    numbers: int
    floats: int
    state: int

    def slot_bytes(self, itemsize: int) -> int:
        """Return the bytes of one token, with `itemsize` bytes a number."""
        return self.numbers * itemsize + self.floats * _FLOAT32_BYTES


def kept_of(kind: str, text: Mapping[str, Any], num_ranks: int = 1) -> Kept:
    """Return what a model keeps.

    kind  model_type of the language model
    text  its part of config.json
    """
    types = _types(kind, text)
    attention = _attention(kind, text, num_ranks)
    linear, (given, state) = 0, _mamba(text) if "linear_num_value_heads" not in text else (0, 0)
    numbers = floats = states = 0
    for one in types:
        if one in _LINEAR:
            if "linear_num_value_heads" in text:
                linear, given, state = _delta_rule(text)
            else:
                linear = _mamba_width(text)
            numbers, floats, states = numbers + linear, floats + given, states + state
        if one == "conv":
            numbers += _number(text, "hidden_size")
        elif one not in _NOTHING and (one not in _LINEAR or one == "hybrid"):
            numbers += attention
    return Kept(numbers, floats, _STATES_OF_A_TEXT * states)


def group_of(text: Mapping[str, Any]) -> int:
    """Return how many query heads share a key head."""
    heads = _number(text, "num_attention_heads", default=1)
    return heads // (_number(text, "num_key_value_heads", default=0) or heads)


def key_heads(text: Mapping[str, Any]) -> int:
    """Return the number of key heads of a layer."""
    heads = _number(text, "num_attention_heads", "n_head", "num_heads", default=1)
    return _number(text, "num_key_value_heads", "num_kv_heads", default=heads)


def _types(kind: str, text: Mapping[str, Any]) -> list[str]:
    """Return what each layer is: a name of transformers' `layer_types`, or "full_attention"."""
    count = _number(text, *LAYER_COUNTS, "n_layers", default=0)
    for field in ("layer_types", "layers_block_type"):
        types = text.get(field)
        if isinstance(types, list | tuple) and types:
            return [str(one) for one in types]
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):
        named = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
        return [named.get(one, "mlp") for one in pattern]
    if kind == "falcon_h1":
        return ["hybrid"] * count
    if isinstance(places := text.get("attn_layer_indices"), list):
        return ["full_attention" if one in places else "mamba" for one in range(count)]
    if "linear_num_value_heads" in text:
        every = _number(text, "full_attention_interval", default=4)
        return ["linear_attention" if (n + 1) % every else "full_attention" for n in range(count)]
    return ["full_attention"] * count


def _attention(kind: str, text: Mapping[str, Any], num_ranks: int) -> int:
    """Return the numbers of one token's key and value in a layer, of the first rank's heads."""
    latent = _number(text, "kv_lora_rank", default=0)
    if latent:
        return latent + _number(text, "qk_rope_head_dim")
    if isinstance(of_attention := text.get("attn_config"), dict):  # DBRX
        width, heads = _number(text, "d_model", default=0), _number(text, "n_heads")
        return 2 * _number(of_attention, "kv_n_heads") * (width // heads)
    heads = _number(text, "num_attention_heads", "n_head", "num_heads", default=1)
    width = _number(text, "hidden_size", "n_embd", "d_model", default=0)
    dim = _number(text, "head_dim", default=0) or width // heads
    groups = key_heads(text)
    if kind in _ONE_KEY_HEAD:
        is_one = text.get("multi_query", True) and not text.get("new_decoder_architecture")
        groups = 1 if is_one else heads
    own = len(shares(groups, num_ranks)[0]) if num_ranks <= groups else groups
    return 2 * own * dim


def _delta_rule(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return what a layer of the gated delta rule keeps: numbers and floats of a token, state."""
    heads = _number(text, "linear_num_value_heads")
    keys = _number(text, "linear_num_key_heads") * _number(text, "linear_key_head_dim")
    values = heads * _number(text, "linear_value_head_dim")
    state = values * _number(text, "linear_key_head_dim") * _FLOAT32_BYTES
    return 2 * keys + values, keys + values + 2 * heads, state


def _mamba_sizes(text: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return the heads, inner width, state size and groups of a Mamba 2 layer."""
    heads = _number(text, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", default=0)
    dim = _number(text, "mamba_d_head", "mamba_head_dim", "mamba_headdim", default=0)
    width = _number(text, "hidden_size", "d_model", default=0)
    expanded = _number(text, "mamba_expand", "expand", default=2) * width
    inner = _number(text, "mamba_d_ssm", default=0) or heads * dim or expanded
    state = _number(text, "mamba_d_state", "ssm_state_size", default=0)
    return heads, inner, state, _number(text, "mamba_n_groups", "n_groups", "mamba_ngroups")


def _mamba_width(text: Mapping[str, Any]) -> int:
    """Return the numbers that enter the convolution of a Mamba 2 layer for each token."""
    _, inner, state, groups = _mamba_sizes(text)
    return inner + 2 * groups * state


def _mamba(text: Mapping[str, Any]) -> tuple[int, int]:
    """Return the floats of a token, and the bytes of a text's state, in a Mamba 2 layer."""
    heads, inner, state, groups = _mamba_sizes(text)
    return inner + groups * state + heads, inner * state * _FLOAT32_BYTES


def _number(text: Mapping[str, Any], *fields: str, default: int = 1) -> int:
    """Return the first of these fields that is a whole number."""
    return next((text[field] for field in fields if type(text.get(field)) is int), default)
