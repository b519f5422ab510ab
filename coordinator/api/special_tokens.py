"""Finds a tokenizer's special tokens by their names (`bos_token` ...), as transformers finds them.

`engine/checkpoint/tokenizer_files.py` reads what the files name. What they do not name may be a
default of the tokenizer's class, which AutoTokenizer chooses by the class in the files and by the
model's type. The tables below say what the installed release of transformers does; a test holds
them to it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coordinator.api.models import folders
from coordinator.api.prompts import BESIDE, find_folder
from proto.errors import ModelError
from proto.system import cannot_read

Stated = Mapping[str, Any]

_S = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_END_OF_TEXT = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_QWEN = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
_BERT = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
# Class of a tokenizer -> the special tokens that it has where no file says otherwise.
DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": _S,
    "CodeLlamaTokenizer": {
        **_S,
        "prefix_token": "▁<PRE>",
        "middle_token": "▁<MID>",
        "suffix_token": "▁<SUF>",
        "eot_token": "▁<EOT>",
        "fill_token": "<FILL_ME>",
    },
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "unk_token": "<UNK>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "sep_token": "<SEP>",
        "mask_token": "<MASK_TOKEN>",
    },
    "GPT2Tokenizer": _END_OF_TEXT,
    "CodeGenTokenizer": _END_OF_TEXT,
    "GPTNeoXTokenizer": {**_END_OF_TEXT, "pad_token": "<|padding|>"},
    "GPTNeoXJapaneseTokenizer": {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    },
    "Qwen2Tokenizer": _QWEN,
    "Qwen3_5Tokenizer": _QWEN,
    "XGLMTokenizer": {**_S, "sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>"},
    "BioGptTokenizer": {**_S, "sep_token": "</s>", "pad_token": "<pad>"},
    "CTRLTokenizer": {"unk_token": "<unk>"},
    "BertTokenizer": _BERT,
}
# Class -> the model types (of those that run here) to which transformers gives it.
_OF_TYPES: Mapping[str, tuple[str, ...]] = {
    "CohereTokenizer": ("aya_vision", "cohere", "cohere2"),
    "GPT2Tokenizer": (
        *("codegen", "dbrx", "emu3", "gpt2", "gptj", "jais2", "opt", "phi", "starcoder2"),
    ),
    "GemmaTokenizer": (
        *("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "recurrent_gemma"),
    ),
    "GPTNeoXTokenizer": ("falcon_mamba", "gpt_neox", "mamba", "mamba2", "olmo", "olmoe"),
    "GPTNeoXJapaneseTokenizer": ("gpt_neox_japanese",),
    "LlamaTokenizer": ("idefics2",),
    "Qwen2Tokenizer": (
        *("internvl", "lighton_ocr", "moss_transcribe_diarize", "qwen2", "qwen2_5_vl"),
        *("qwen2_audio", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_next"),
        *("qwen3_vl", "qwen3_vl_moe"),
    ),
    "Qwen3_5Tokenizer": ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
    "XGLMTokenizer": ("xglm",),
    "BioGptTokenizer": ("biogpt",),
    "CTRLTokenizer": ("ctrl",),
    "BertTokenizer": ("git",),
}
# Model types whose tokenizer is always what tokenizer.json says, without a class of its own: a
# class in the files counts only if it is the one of this table.
_WITHOUT_CLASS = {
    *("beam", "ernie4_5", "ernie4_5_moe", "flex_olmo", "fuyu", "glm", "glm4", "glm4_moe"),
    *("glm4_moe_lite", "got_ocr2", "gpt_bigcode", "granite", "granitemoe", "granitemoehybrid"),
    *("granitemoeshared", "hyperclovax", "internlm3", "iquestcoder", "jamba", "kimi_linear"),
    *("llava", "llava_next"),
    *("mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral"),
    *("mistral3", "mixtral"),
    *("modernbert-decoder", "nemotron", "olmo2", "olmo3", "olmo_hybrid", "persimmon", "phi3"),
    *("phimoe",),
    *("smolvlm", "stablelm", "vipllava", "voxtral"),
}
# Model types of which the class in the files is known to be wrong: the one of `_OF_TYPES` counts.
_WRONG_IN_FILES = {"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"}
_BY_TYPE = {kind: name for name, kinds in _OF_TYPES.items() for kind in kinds}


def _class_of(tokenizer: Stated, model: Stated, is_byte_level: Callable[[], bool]) -> str:
    """Return the tokenizer class that AutoTokenizer takes; "" for one without defaults."""
    kind = str(model.get("model_type"))
    usual = _BY_TYPE.get(kind, "")
    named = tokenizer.get("tokenizer_class") or model.get("tokenizer_class")
    if not isinstance(named, str):
        return usual
    named = named.removesuffix("Fast")
    if kind in _WITHOUT_CLASS:
        return ""
    if kind in _WRONG_IN_FILES:
        return usual
    # LlamaTokenizer splits texts in the way of sentencepiece, and this file does not.
    return "" if named == "LlamaTokenizer" and is_byte_level() else named


# -- files -----------------------------------------------------------------------------------------


def read_special_tokens(model: str, revision: str | None) -> dict[str, str]:
    """Return the special tokens of a model's tokenizer, by their names. Raises ModelError."""
    config = "config.json"
    folder = find_folder(model, revision, *BESIDE, folders.TOKENIZER, config)
    if folder is None:
        return {}
    tokenizer, stated = (read_json(_there(folder / name)) for name in (BESIDE[0], config))

    def is_byte_level() -> bool:
        path = _there(folder / folders.TOKENIZER)
        return path is not None and '"ByteLevel"' in read_text(path)

    defaults = DEFAULTS.get(_class_of(tokenizer, stated, is_byte_level), {})
    found = {**defaults, **folders.named_tokens(folder)}
    return {name: token for name, token in found.items() if token is not None}


def _there(path: Path) -> Path | None:
    return path if path.exists() else None


def read_json(path: Path | None) -> Mapping[str, Any]:
    """Return the JSON object in a file; {} if there is no file. Raises ModelError."""
    return {} if path is None else folders.read_object(path)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ModelError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {cannot_read(error)}") from error
    except ValueError as error:
        raise ModelError(f"cannot read {path}: {error}; get it again") from error
