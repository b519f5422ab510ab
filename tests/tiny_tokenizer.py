"""Tokenizers for the small random models: a token for each byte, and the sentencepiece kind."""

from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

SPECIAL = "<|end|>"
VOCAB_SIZE = 257  # 256 bytes and SPECIAL


def truncation_to(num_tokens: int) -> dict[str, Any]:
    """What a tokenizer.json says of truncation."""
    return {
        "direction": "Right",
        "max_length": num_tokens,
        "strategy": "LongestFirst",
        "stride": 0,
    }


def padding_to(num_tokens: int, token: str) -> dict[str, Any]:
    """What a tokenizer.json says of padding."""
    return {
        "strategy": {"Fixed": num_tokens},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": token,
    }


def save_bytewise_tokenizer(folder: Path) -> None:
    """Save it where a model of at least VOCAB_SIZE tokens lies."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


def sentencepiece_tokenizer(words: str = "the is of a cat text end") -> Tokenizer:
    """As Llama 2 has it: a space is put before a text and taken away again; bytes fall back.

    Its ids begin with <unk>, <s>, </s> and the 256 bytes.
    """
    letters = sorted({"▁", *words.replace(" ", ""), *".,"})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges: list[tuple[str, str]] = []
    for word in ("▁▁", *(f"▁{word}" for word in words.split())):
        for length in range(1, len(word)):
            pair = (word[:length], word[length])
            merges += [] if pair in merges else [pair]
    names += ["".join(pair) for pair in merges]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    return tokenizer
