"""Which families of models this engine cannot run, by what config.json says and nothing else.

Of every token the engine keeps a key and a value that it can drop, move and hide behind a mask.
Where a layer keeps something else, a branch of drafts cannot be rolled back. One table for both
sides: whoever starts a node asks it with what config.json states, the node with what transformers
makes of that. So it knows also what a family does where config.json is silent. Without torch.
"""

from collections.abc import Iterator, Mapping, Set
from typing import Any

Stated = Mapping[str, Any]

USE_ANOTHER = "use a model with plain full attention"

_PLAIN = {"full_attention", "attention"}
_SLIDING = {"sliding_attention", "reference_sliding_attention"}
_WITH_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "recurrent", "mamba"}

RECURRENT = "recurrent layers, whose state cannot be rolled back"
ALIBI = "ALiBi position biases, which go by the slot of a token and not by its position"
CHUNKED = "chunked attention, which a rolled-back tree would break"
_SPARSE = "sparse attention with an index of its own, which cannot be rolled back"
_OWN_MASK = "an attention mask of its own, which would hide the tree's"
_OWN_POSITIONS = "positions that it counts itself, from the first token of a pass"
_OWN_CACHE = "no cache of a key and a value per token"
_CROSS = "layers of attention to something other than the text"
_BYTES = "patches of bytes in place of tokens"

# Whatever else config.json says.
_ALWAYS: Mapping[str, tuple[str, ...]] = {
    RECURRENT: (
        *(
            "bailing_hybrid",
            "bamba",
            "deepseek_v4",
            "falcon_h1",
            "falcon_mamba",
            "granitemoehybrid",
        ),
        *("jamba", "kimi_linear", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_next"),
        *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
    ),
    ALIBI: ("bloom",),
    _SPARSE: ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"),
    _OWN_MASK: ("gpt_neo",),
    _OWN_POSITIONS: (
        *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "roformer", "trocr"),
        *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    ),
    _OWN_CACHE: ("cpmant", "openai-gpt", "reformer", "xlm", "xlnet"),
    _CROSS: ("mllama", "mllama_text_model"),
    _BYTES: ("blt",),
}
# Where config.json has no `layer_types`: the kind of layer that there is.
_BY_DEFAULT: Mapping[str, tuple[str, ...]] = {
    "linear_attention": (
        *("inkling2_text", "inkling_text", "minimax", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen4_exp", "qwen4_exp_text", "zaya"),
    ),
    "chunked_attention": ("llama4", "llama4_text"),
    "sliding_attention": (
        *("afmoe", "beam", "cohere2", "cohere2_moe", "cwm", "dots3_note", "dots3_note_text"),
        *("exaone4", "exaone_moe", "flint", "gemma2", "gemma3", "gemma3_text", "gemma3n"),
        *("gemma3n_text", "gemma4", "gemma4_assistant", "gemma4_text", "gemma4_unified"),
        *("gemma4_unified_assistant", "gemma4_unified_text", "gpt_oss", "granite_swa"),
        *("granitemoe_swa", "kolibri1", "lfm3", "mimo_v2_flash", "modernbert-decoder", "moshi"),
        *("olmo3", "vaultgemma"),
    ),
}
# Whose every layer has a window of so many tokens where config.json does not say `sliding_window`.
_WINDOWS: Mapping[str, int] = {"ministral": 4096, "mistral": 4096}
# Whose `sliding_window` counts only with `use_sliding_window`, and from which layer on (None: all).
_WINDOW_BY_FLAG: Mapping[str, int | None] = {
    **dict.fromkeys(("qwen2", "qwen3"), 28),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "smollm3", "iquestcoder"), None),
}
# Which read the whole text at once, unless config.json says `is_decoder`.
_ENCODERS = {
    *("bert", "bert-generation", "big_bird", "electra", "ernie", "megatron-bert", "rembert"),
    *("roc_bert",),
}
# Which have an encoder, unless config.json says that there is none.
_ENCODER_DECODERS = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen"),
    *("musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "whisper"),
}


def why_not(kind: str, text: Stated) -> str | None:
    """Return what it is that this engine cannot run, to follow "<kind> has"; None: nothing.

    kind  the model type of the whole
    text  what describes its language model, or all of it
    """
    kinds = {kind, str(text.get("model_type"))}
    for why, names in _ALWAYS.items():
        if not kinds.isdisjoint(names):
            return why
    if _has_alibi(kinds, text):
        return ALIBI
    if not kinds.isdisjoint(_ENCODERS) and text.get("is_decoder") is not True:
        return "a view of the whole text at once (is_decoder is not true)"
    types = set(_types_of(kinds, text)) - _PLAIN
    if types & _SLIDING:
        tokens = text.get("sliding_window") or _default_window(kinds)
        of = f" ({tokens} tokens)" if type(tokens) is int else ""
        return f"sliding-window attention{of}, which a rolled-back tree would break"
    if "chunked_attention" in types:
        return CHUNKED
    if types & _WITH_STATE:
        return RECURRENT
    if types:
        named = ", ".join(sorted(types))
        return f"layers of type {named}, which do not keep a key and value per token"
    return None


def has_encoder(kind: str, stated: Stated) -> bool:
    """Return whether it is an encoder-decoder model."""
    found = stated.get("is_encoder_decoder")
    return found is True or (found is None and kind in _ENCODER_DECODERS)


def _has_alibi(kinds: Set[str], text: Stated) -> bool:
    inner = text.get("attn_config")
    found = inner.get("alibi") if isinstance(inner, dict) else None
    if "mpt" in kinds:
        return found is not False
    return bool(text.get("alibi")) or bool(found)


def _types_of(kinds: Set[str], text: Stated) -> Iterator[str]:
    """The types of the layers, as far as they are known to differ from plain ones."""
    types = text.get("layer_types")
    if isinstance(types, list | tuple) and types:
        yield from map(str, types)
        return
    yield from (kind for kind, names in _BY_DEFAULT.items() if not kinds.isdisjoint(names))
    if _has_window(kinds, text):
        yield "sliding_attention"
    if text.get("attention_chunk_size"):
        yield "chunked_attention"


def _has_window(kinds: Set[str], text: Stated) -> bool:
    window = text.get("sliding_window", _default_window(kinds))
    for kind, first in _WINDOW_BY_FLAG.items():
        if kind not in kinds:
            continue
        if text.get("use_sliding_window") is not True or window is None:
            return False
        first, count = text.get("max_window_layers", first), text.get("num_hidden_layers")
        is_counted = kind in ("qwen2", "qwen3") and type(first) is int and type(count) is int
        return not is_counted or first < count
    return type(window) is int


def _default_window(kinds: Set[str]) -> int | None:
    if not kinds.isdisjoint(_WINDOW_BY_FLAG):
        return 4096
    return next((size for kind, size in _WINDOWS.items() if kind in kinds), None)
