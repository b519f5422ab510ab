"""Which model families this engine cannot run, decided from config.json alone.

For each token the engine keeps a key and a value that it can drop, move and hide behind a mask; of
a short convolution or a layer with a running state what the token gives to later ones, in their
place. A layer that keeps anything else cannot be rolled back after rejected drafts. One table
serves both sides: the coordinator asks it with the content of config.json before it starts a node;
the node does the same, and asks again with transformers' configuration made of that. So the table
also says what a family does where config.json is silent. It names every causal language model of
the installed release of transformers (pyproject.toml); other model types are refused. Needs no
torch.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from engine.checkpoint.files import as_json, parts
from engine.errors import ModelError
from engine.layout.attention_windows import AttentionWindow, LayerKinds

Stated = Mapping[str, Any]

_PLAIN = {"full_attention", "attention"}
_SLIDING = {"sliding_attention", "reference_sliding_attention"}
_CHUNKED = "chunked_attention"
_CONVOLUTION, _LINEAR = "conv", "linear_attention"
# Nemotron H has feed-forward blocks and experts in layers of their own; "hybrid" is Zamba's word
# for attention and Mamba in one layer.
_OF_STATES = {"linear_attention", "mamba", "hybrid", "mlp", "moe"}
_WITH_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "recurrent", "mamba"}

RECURRENT = "recurrent layers, whose state cannot be rolled back"
ALIBI = "ALiBi position biases, which go by the slot of a token and not by its position"
CHUNKED = "chunked attention, of which this engine does not know the masks"
_COMPRESSED = "keys and values that stand for several tokens, which cannot be rolled back"
_OWN_STATES = "recurrent states that it keeps outside of transformers' caches"
_MIXED_HEADS = "attention whose queries, keys and values are mixed with those of earlier tokens"
_SPARSE = "sparse attention with an index of its own, which cannot be rolled back"
_OWN_MASK = "an attention mask of its own, which would hide the tree's"
_OWN_POSITIONS = "positions that it counts itself, from the first token of a pass"
_OWN_CACHE = "no cache of a key and a value per token"
_CROSS = "layers of attention to something other than the text"
_BYTES = "patches of bytes in place of tokens"
ENCODER_DECODER = "an encoder-decoder model"

# Reason -> the model types that are refused for it, whatever else config.json says.
_ALWAYS: Mapping[str, tuple[str, ...]] = {
    _OWN_STATES: ("rwkv", "xlstm"),
    _MIXED_HEADS: ("zaya",),
    _COMPRESSED: ("deepseek_v4",),
    ALIBI: ("bloom", "mpt"),  # transformers' MPT has them also where config.json has none
    _SPARSE: ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "qwen4_exp", "qwen4_exp_text"),
    _OWN_MASK: ("gpt_neo",),
    _OWN_POSITIONS: (
        *("camembert", "data2vec-text", "inkling2_text", "inkling_text", "roberta"),
        *("roberta-prelayernorm", "roformer", "trocr", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    ),
    _OWN_CACHE: ("cpmant", "openai-gpt", "reformer", "xlm", "xlnet"),
    _CROSS: ("mllama",),
    _BYTES: ("blt",),
}
# Kind of layer -> the model types that have such layers where config.json has no `layer_types`.
_BY_DEFAULT: Mapping[str, tuple[str, ...]] = {
    "linear_attention": (
        *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid"),
        *("jamba", "kimi_linear", "mamba", "mamba2", "minimax"),
        *("nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba", "zamba2"),
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
# Model types whose sliding windows or chunks run.
_WITH_WINDOWS = {
    *("afmoe", "beam", "cohere2", "cohere2_moe", "cwm", "dots1", "exaone4", "exaone_moe"),
    *("flint", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text"),
    *("gpt_oss", "granite_swa", "granitemoe_swa", "kolibri1", "laguna", "llama4", "llama4_text"),
    *("mellum", "mimo_v2_flash", "ministral", "ministral3", "mistral", "mixtral"),
    *("modernbert-decoder", "olmo3", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("recurrent_gemma", "smollm3", "starcoder2", "vaultgemma"),
}
# Model types whose short convolutions run (`forward/short_conv.py`).
_WITH_CONVOLUTIONS = {"lfm2", "lfm2_moe"}
# Model types whose layers with the gated delta rule run (`forward/delta_rule.py`).
_WITH_DELTA_RULE = {"olmo_hybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
# Model types whose layers with a decay for each channel run (`forward/kimi_delta.py`).
_WITH_KIMI_DELTA = {"bailing_hybrid", "kimi_linear"}
# Model types whose lightning attention runs (`forward/lightning.py`).
_WITH_LIGHTNING = {"minimax"}
# Model types whose Mamba 2 layers run (`forward/mamba2.py`).
_WITH_MAMBA_2 = {"bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"}
# Model types whose Mamba 1 layers run (`forward/mamba1.py`).
_WITH_MAMBA_1 = {"falcon_mamba", "jamba", "mamba", "zamba"}
# Model types whose gated linear recurrent units run (`forward/recurrent_unit.py`).
_WITH_UNITS = {"recurrent_gemma"}
_KEEPING_STATES = {
    *(*_WITH_DELTA_RULE, *_WITH_KIMI_DELTA, *_WITH_LIGHTNING, *_WITH_MAMBA_1, *_WITH_MAMBA_2),
    *_WITH_UNITS,
}
_WITHOUT_ATTENTION = {"falcon_mamba", "mamba", "mamba2"}
# Model types whose texts may have any length.
UNLIMITED = _WITHOUT_ATTENTION | {"recurrent_gemma"}
# Model types whose layers all have the window if there is one; they know no `layer_types`.
_ONE_WINDOW = {
    *("ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"),
}
# Model type -> attention window (tokens) of every layer where config.json has no `sliding_window`.
_WINDOWS: Mapping[str, int] = {"ministral": 4096, "mistral": 4096, "recurrent_gemma": 2048}
# Model types whose `sliding_window` counts only with `use_sliding_window` -> the first layer that
# has the window (None: all layers).
_WINDOW_BY_FLAG: Mapping[str, int | None] = {
    **dict.fromkeys(("qwen2", "qwen3"), 28),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "smollm3", "iquestcoder"), None),
}
# Model types that attend to the whole text at once, unless config.json says `is_decoder`.
_ENCODERS = {
    *("bert", "bert-generation", "big_bird", "electra", "ernie", "megatron-bert", "rembert"),
    *("roc_bert",),
}
# Model types that have an encoder, unless config.json says that there is none.
_ENCODER_DECODERS = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen"),
    *("musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "whisper"),
}

# Model types with plain full attention, unless config.json says otherwise.
_OTHERS = {
    *("apertus", "arcee", "aria_text", "axk1", "biogpt", "bitnet", "codegen", "cohere"),
    *("cohere_compass_text", "ctrl", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "doge"),
    *("dots1", "emu3", "ernie4_5", "ernie4_5_moe", "falcon", "flex_olmo", "fuyu", "gemma", "git"),
    *("glm", "glm4", "glm4_moe", "glm4_moe_lite", "got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode"),
    *("gpt_neox", "gpt_neox_japanese", "gptj", "granite", "granitemoe", "granitemoeshared"),
    *("helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax"),
    *("internlm3", "jais2", "jetmoe", "laguna", "lfm2", "lfm2_moe", "llama", "longcat_flash"),
    *("mellum", "minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral3", "mixtral"),
    *("moss_transcribe_diarize", "nanochat", "nemotron", "olmo", "olmo2", "olmoe", "opt"),
    *("persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "seed_oss", "solar_open"),
    *("stablelm", "starcoder2", "xglm", "youtu"),
}
# Model types that our own forward (`fused`) runs.
FUSED = ("llama", "mistral", "qwen2", "qwen3")
# Model types whose rows do not depend on each other with linear layers and attention of our own
# (`forward/by_row.py`): those that tests/engine/test_exact.py has found so.
BY_ROW = frozenset(
    (
        *("afmoe", "apertus", "arcee", "aria_text", "beam", "biogpt", "bitnet", "cohere"),
        *("cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "doge", "ernie4_5"),
        *("ernie4_5_moe", "exaone4", "flex_olmo", "gemma", "gemma3_text", "gemma3n_text"),
        *("gemma4_unified_text", "glm", "glm4", "gpt_bigcode", "gpt_neox", "granite"),
        *("granitemoe", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax"),
        *("internlm3", "iquestcoder", "jais2", "lfm2", "lfm2_moe", "mellum", "minimax_m2"),
        *("minimax_m3_vl_text", "ministral", "ministral3", "mixtral", "nanochat", "nemotron"),
        *("olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "qwen2_moe"),
        *("qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    )
)
# Model types with experts in transformers' common form (in some, only if config.json says so).
_MIXTURES = {
    *("afmoe", "aria_text", "axk1", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1"),
    *("ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma4_text", "glm4_moe"),
    *("glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid"),
    *("granitemoeshared", "hunyuan_v1_moe", "hy_v3", "kolibri1", "laguna", "lfm2_moe", "mellum"),
    *("bailing_hybrid", "jamba", "kimi_linear", "mimo_v2_flash", "minimax", "minimax_m2"),
    *("minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe"),
    *("phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open"),
}
# Model types with experts in code of their own -> True if that makes the host wait for a GPU.
_OWN_EXPERTS: Mapping[str, bool] = {
    **dict.fromkeys(("dbrx", "jetmoe", "longcat_flash"), True),
    **dict.fromkeys(("doge", "llama4_text"), False),
}
# Model types for which transformers has no attention but the one in single operators.
_EAGER = {
    *("codegen", "flint", "gemma2", "git", "gpt_neox_japanese", "gpt_oss", "gptj"),
    *("granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma", "xglm"),
}
# Model types that are not refused, and of which no test runs a small random model.
_UNTESTED = {
    *("emu3", "fuyu", "git", "moss_transcribe_diarize", "phi4_multimodal"),
}
# Model types of several modalities (text, pictures, sound), of which only the language model is
# loaded -> the type of that language model where config.json does not say.
WRAPPERS: Mapping[str, str] = {
    **dict.fromkeys(("aya_vision", "cohere2_vision"), "cohere2"),
    **dict.fromkeys(("deepseek_vl", "idefics3", "llava", "llava_next"), "llama"),
    **dict.fromkeys(("llava_next_video", "smolvlm", "vipllava", "voxtral"), "llama"),
    **dict.fromkeys(("idefics2", "mistral3"), "mistral"),
    **dict.fromkeys(("got_ocr2", "internvl", "llava_onevision", "qwen2_audio"), "qwen2"),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), "qwen2"),
    **dict.fromkeys(("lighton_ocr", "qwen3_vl"), "qwen3"),
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe": "qwen3_moe",
}
# Language models that transformers has only in a wrapper -> the model type with the same layers.
# Their rotary embedding has positions in three dimensions; in a text all three are the usual one.
_SAME_LAYERS: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Every model type for which transformers has a causal language model.
CAUSAL = frozenset(
    chain(
        *(*_ALWAYS.values(), *_BY_DEFAULT.values(), _WINDOWS, _WINDOW_BY_FLAG),
        *(_ENCODERS, _ENCODER_DECODERS, _OTHERS),
    )
)


def refuse(name: str, path: Path, stated: Stated, text: Stated | None = None) -> None:
    """Raise ModelError if the configuration says that this engine cannot run the model.

    name    the model's name as the user gave it
    path    path of its config.json, for messages
    stated  the content of config.json, or transformers' configuration as a dictionary
    text    the part that describes the language model; None: `text_config` in `stated`, if it has
            one, else all of it
    """
    kind = stated.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ModelError(
            f"{path}: model_type is {as_json(kind)}, and it must name the architecture; is it a "
            "model for transformers?"
        )
    if _has_encoder(kind, stated):
        raise ModelError(f"{name}: it is {ENCODER_DECODER}; use a decoder-only one")
    if kind not in CAUSAL and kind not in WRAPPERS:
        near = get_close_matches(kind, sorted({*CAUSAL, *WRAPPERS}), n=1)
        raise ModelError(
            f"{path}: model_type is {as_json(kind)}, of which transformers has no causal language "
            f"model; use another{f'; did you mean {near[0]}?' if near else ''}"
        )
    if text is None:
        *_, text = parts(dict(stated))
    kind, of = text_kind(kind, text), kind
    if kind != of and _has_encoder(kind, text):
        raise ModelError(f"{name}: it is {ENCODER_DECODER}; use a decoder-only one")
    if kind not in CAUSAL:
        raise ModelError(
            f"{path}: its language model is of type {as_json(kind)}, which cannot write a text; "
            "use another"
        )
    if kind != of:
        text = {**text, "model_type": kind}
    if why := _why_not(kind, text):
        raise ModelError(f"{name}: {of} has {why}; use a model with plain full attention")


def text_kind(kind: str, text: Stated) -> str:
    """Return the type of the language model that is loaded: `kind`, but for those in `WRAPPERS`.

    kind  model_type of the whole model; `text` describes the language model, or the whole model
    """
    if kind not in WRAPPERS:
        return kind
    inner = text.get("model_type")
    inner = WRAPPERS[kind] if inner in (None, kind) else str(inner)
    return _SAME_LAYERS.get(inner, inner)


def _why_not(kind: str, text: Stated) -> str | None:
    """Return the feature that this engine cannot run, worded to follow "<kind> has", or None."""
    kinds = {kind, str(text.get("model_type", kind))}
    for why, names in _ALWAYS.items():
        if not kinds.isdisjoint(names):
            return why
    if _has_alibi(text):
        return ALIBI
    if not kinds.isdisjoint(_ENCODERS) and text.get("is_decoder") is not True:
        return "a view of the whole text at once (is_decoder is not true)"
    types = set(_types_of(kinds, text)) - _PLAIN
    has_windows = kinds <= _WITH_WINDOWS
    if types & _SLIDING and not has_windows:
        tokens = text.get("sliding_window") or _default_window(kinds)
        of = f" ({tokens} tokens)" if type(tokens) is int else ""
        return f"sliding-window attention{of}, of which this engine does not know the masks"
    if _CHUNKED in types and not has_windows:
        return CHUNKED
    if kinds <= _WITH_CONVOLUTIONS:
        types -= {_CONVOLUTION}
    if kinds <= _KEEPING_STATES:
        types -= _OF_STATES
    if types & _WITH_STATE:
        return RECURRENT
    types -= _SLIDING | {_CHUNKED}
    if types:
        named = ", ".join(sorted(types))
        return f"layers of type {named}, which do not keep a key and value per token"
    return None


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of a model type before any model of it is seen: a row of docs/models.md.

    has_attention  False: it has no attention at all
    refused      why it is refused where config.json is silent; None: it is not
    has_windows  True: sliding windows or chunks run, if config.json states them
    has_chunks   True: these are chunks
    has_convolutions  True: short convolutions run, if config.json states them
    has_states   True: layers with a running state run, if config.json states them
    is_fused     True: our own forward runs it
    is_by_row    True: on a CPU its rows do not depend on each other (docs/models.md, exact targets)
    experts      "": it has none; "common" or "own": whose code computes them
    is_eager     True: transformers computes its attention in single operators
    is_recorded  True: its passes can be recorded as CUDA graphs
    is_tested    True: a test runs a small random model of it
    """

    kind: str
    refused: str | None
    has_attention: bool
    has_windows: bool
    has_chunks: bool
    has_convolutions: bool
    has_states: bool
    is_fused: bool
    is_by_row: bool
    experts: str
    is_eager: bool
    is_recorded: bool
    is_tested: bool


def family(kind: str) -> Family:
    """Return what is known of a model type: one of `CAUSAL`, and none of `WRAPPERS`."""
    refused = ENCODER_DECODER if _has_encoder(kind, {}) else _why_not(kind, {})
    own = "own" if kind in _OWN_EXPERTS else ""
    has_states = kind in _KEEPING_STATES
    return Family(
        kind,
        refused,
        has_attention=kind not in _WITHOUT_ATTENTION,
        has_windows=kind in _WITH_WINDOWS,
        has_chunks=kind in _BY_DEFAULT[_CHUNKED],
        has_convolutions=kind in _WITH_CONVOLUTIONS,
        has_states=has_states,
        is_fused=kind in FUSED,
        is_by_row=kind in FUSED or kind in BY_ROW,
        experts="common" if kind in _MIXTURES else own,
        is_eager=kind in _EAGER,
        is_recorded=not _OWN_EXPERTS.get(kind, False) and not has_states,
        is_tested=refused is None and kind not in _UNTESTED,
    )


def layer_kinds(kind: str, text: Stated, num_layers: int) -> LayerKinds:
    """Return what the layers of a model that is not refused see of a text.

    kind  model_type of the whole model
    text  transformers' configuration of the language model, as a dictionary
    """
    if kind in WRAPPERS:
        kind = text_kind(kind, text)
        text = {**text, "model_type": kind}
    kinds = {kind, str(text.get("model_type", kind))}
    types: Sequence[str] = ()
    if kinds.isdisjoint(_ONE_WINDOW):
        types = tuple(map(str, text.get("layer_types") or _repeated(text, num_layers)))
    if len(types) != num_layers:
        types = ("sliding_attention" if _has_window(kinds, text) else "full_attention",)
        types *= num_layers
    seen = {
        **dict.fromkeys(_SLIDING, _window(_stated_window(text))),
        _CHUNKED: _window(text.get("attention_chunk_size"), is_chunk=True),
    }
    return LayerKinds.of([seen.get(of_layer) for of_layer in types])


def _repeated(text: Stated, num_layers: int) -> Sequence[str]:
    """Return the types of a RecurrentGemma's layers, whose pattern config.json has; else ()."""
    pattern = text.get("block_types")
    if not isinstance(pattern, list | tuple) or not pattern:
        return ()
    types = ["sliding_attention" if one == "attention" else _LINEAR for one in pattern]
    return (types * num_layers)[:num_layers]


def _stated_window(text: Stated) -> Any:
    """Return the size of the windows as config.json states it, under any of its names."""
    return text.get("sliding_window", text.get("attention_window_size"))


def _window(size: Any, *, is_chunk: bool = False) -> AttentionWindow | None:
    """Return a window of so many tokens; None if that is no number of tokens."""
    is_size = type(size) is int and size > 0
    return AttentionWindow(size, is_chunk) if is_size else None


def _has_encoder(kind: str, stated: Stated) -> bool:
    """True if it is an encoder-decoder model."""
    found = stated.get("is_encoder_decoder")
    return found is True or (found is None and kind in _ENCODER_DECODERS)


def _has_alibi(text: Stated) -> bool:
    """True if the model uses ALiBi position biases."""
    inner = text.get("attn_config")
    found = inner.get("alibi") if isinstance(inner, dict) else None
    return bool(text.get("alibi")) or bool(found)


def _types_of(kinds: Set[str], text: Stated) -> Iterator[str]:
    """Yield config.json's `layer_types`; without that, the kinds of layers that are not plain."""
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
    """True if any layer has a sliding window; for configurations without `layer_types`."""
    window = _stated_window(text) if "sliding_window" in text else _default_window(kinds)
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
    """Return the window (tokens) of a family where config.json is silent; None: no window."""
    if not kinds.isdisjoint(_WINDOW_BY_FLAG):
        return 4096
    return next((size for kind, size in _WINDOWS.items() if kind in kinds), None)
