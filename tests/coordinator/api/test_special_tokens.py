"""Special tokens: named and chosen as AutoTokenizer names and chooses them."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto as auto

from coordinator.api import special_tokens
from coordinator.api.chat import ChatTemplate
from engine.checkpoint.families import CAUSAL, WRAPPERS, family

KINDS = sorted({one for one in CAUSAL if family(one).refused is None} | WRAPPERS.keys())
WORDS = ["<s>", "</s>", "<unk>", "<b>", "<e>", "<bos>", "<eos>", "<|endoftext|>", "hi"]
# Shows every special token that a template may read.
SHOWS_ALL = "|".join(
    f"{{{{ {name}_token }}}}"
    for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask", "image")
)
HI = [{"role": "user", "content": "hi"}]


def put(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def make(folder: Path, *, byte_level: bool = False) -> None:
    """Put a tokenizer.json of a few words into a folder."""
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [], unk_token=None))
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "in tokenizer_config": ({"bos_token": "<b>", "eos_token": "<e>"}, None, "llama"),
    "only in the map": ({}, {"bos_token": "<b>", "eos_token": {"content": "<e>"}}, "llama"),
    "the map wins": ({"bos_token": "<s>"}, {"bos_token": "<b>"}, "llama"),
    "the map of no account": (
        {"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}, "bos_token": "<s>"},
        {"bos_token": "<b>", "eos_token": "<e>"},
        "llama",
    ),
    "named ones": ({"extra_special_tokens": {"image_token": "<b>"}}, None, "llama"),
    "one of the model": ({"image_token": "<b>"}, None, "llama"),
    "no class": ({}, None, "llama"),
    "Llama's class": ({"tokenizer_class": "LlamaTokenizer"}, None, "llama"),
    "Llama's fast class": ({"tokenizer_class": "LlamaTokenizerFast"}, None, "llama"),
    "Llama's class without a begin": (
        {"tokenizer_class": "LlamaTokenizer", "bos_token": None},
        None,
        "llama",
    ),
    "a class that is no one's": ({"tokenizer_class": "OurTokenizer"}, None, "llama"),
    "a plain class": ({"tokenizer_class": "PreTrainedTokenizerFast"}, None, "gpt2"),
    "Llama's class in Mistral": ({"tokenizer_class": "LlamaTokenizer"}, None, "mistral"),
    "Llama's class in Phi-3": ({"tokenizer_class": "LlamaTokenizer"}, None, "phi3"),
    "a type's own class": ({}, None, "gpt2"),
    "Gemma": ({}, None, "gemma2"),
    "Gemma with its class": ({"tokenizer_class": "GemmaTokenizer"}, None, "gemma2"),
    "Qwen2 with another's class": ({"tokenizer_class": "LlamaTokenizer"}, None, "qwen2"),
    "Qwen3": ({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<e>"}, None, "qwen3"),
    "Qwen3 with another's class": ({"tokenizer_class": "GPT2Tokenizer"}, None, "qwen3"),
}


@pytest.mark.parametrize("byte_level", [False, True], ids=["of words", "of bytes"])
@pytest.mark.parametrize(("tokenizer", "in_map", "kind"), CASES.values(), ids=CASES.keys())
def test_special_tokens_are_those_of_transformers(
    tmp_path: Path,
    tokenizer: dict[str, Any],
    in_map: dict[str, Any] | None,
    kind: str,
    *,
    byte_level: bool,
) -> None:
    make(tmp_path, byte_level=byte_level)
    put(tmp_path, "config.json", {"model_type": kind})
    put(tmp_path, "tokenizer_config.json", {**tokenizer, "chat_template": SHOWS_ALL})
    if in_map is not None:
        put(tmp_path, "special_tokens_map.json", in_map)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    want = theirs.apply_chat_template(HI, tokenize=False)
    assert ChatTemplate.of_model(str(tmp_path), None).render(HI) == want


def test_a_class_in_config_json_counts_where_the_tokenizer_names_none(tmp_path: Path) -> None:
    make(tmp_path)
    put(tmp_path, "config.json", {"model_type": "llama", "tokenizer_class": "LlamaTokenizer"})
    put(tmp_path, "tokenizer_config.json", {"chat_template": SHOWS_ALL})
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    want = theirs.apply_chat_template(HI, tokenize=False)
    assert want.startswith("<s>|</s>")
    assert ChatTemplate.of_model(str(tmp_path), None).render(HI) == want


@pytest.mark.parametrize("kind", KINDS)
def test_each_model_type_has_the_class_that_transformers_gives_it(kind: str) -> None:
    theirs = auto.TOKENIZER_MAPPING_NAMES.get(kind)
    has_none = theirs in ("TokenizersBackend", "MistralCommonBackend")
    ours = special_tokens._BY_TYPE.get(kind)
    assert (kind in special_tokens._WITHOUT_CLASS) == has_none
    assert ours == (None if theirs is None or has_none else theirs.removesuffix("Fast"))
    is_wrong = kind in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS and not has_none
    assert (kind in special_tokens._WRONG_IN_FILES) == is_wrong


@pytest.mark.parametrize("name", special_tokens.DEFAULTS)
def test_each_class_has_the_defaults_that_transformers_gives_it(name: str) -> None:
    theirs = auto.tokenizer_class_from_name(name)
    assert theirs is not None
    given = inspect.signature(theirs.__init__).parameters
    defaults = {one: given[one].default for one in given if one.endswith("_token")}
    want = {one: value for one, value in defaults.items() if isinstance(value, str)}
    assert special_tokens.DEFAULTS[name] == want
