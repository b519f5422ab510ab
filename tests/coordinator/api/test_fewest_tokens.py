"""How many tokens a text has at least, by its bytes: never more than it has."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from coordinator.api.fewest_tokens import COMPOSED, bytes_per_token
from coordinator.api.models.tokenizers import OUR_TARGET
from coordinator.api.prompts import Tokenization, TooManyTokensError
from tests.tiny_tokenizer import sentencepiece_tokenizer

# What shrinks where something can: Kelvin signs, letters with accents behind them, Korean in parts,
# spaces, unknown signs, special tokens.
PIECES = (
    *("\u212a", "\u1fbe\u0308\u0301", "\u1112\u1161\u11ab", "e\u0301", "\u037e", "\u1fef"),
    *(" ", "   ", "\n\n", "\t", "a", "the", " the end", "中文", "🙂", "\x00", "<|end|>", "<s>"),
)


def bytewise(normalizer: Any = None) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    names = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def of_letters(*, fuses: bool = False, normalizer: Any = None, step: Any = None) -> Tokenizer:
    """A token for some letters, and one for what is unknown."""
    names = ["<unk>", *"▁abcdefghijklmnopqrst"]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=fuses))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if step is not None:
        tokenizer.pre_tokenizer = step
    return tokenizer


def stripping() -> Tokenizer:
    tokenizer = bytewise()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def without_all_bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "Ġ": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def unigram() -> Tokenizer:
    return Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))


def cut_off() -> Tokenizer:
    tokenizer = bytewise()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|>", special_tokens=[("<|end|>", 259)]
    )
    return tokenizer


KEEPING: dict[str, Callable[[], Tokenizer]] = {
    "ours": lambda: Tokenizer.from_file(str(OUR_TARGET / "tokenizer.json")),
    "bytes": bytewise,
    "composed": lambda: bytewise(normalizers.NFC()),
    "decomposed": lambda: bytewise(normalizers.Sequence([normalizers.NFD()])),
    "sentencepiece": sentencepiece_tokenizer,
    "letters": of_letters,
    "a space as a sign": lambda: of_letters(step=pre_tokenizers.Metaspace()),
    "cut": lambda: of_letters(step=pre_tokenizers.Punctuation("isolated")),
}
SHRINKING: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "unknown letters become one": (lambda: of_letters(fuses=True), "中"),
    "spaces before a token": (stripping, " "),
    "spaces at the ends": (lambda: bytewise(normalizers.Strip()), " "),
    "spaces between words": (lambda: of_letters(step=pre_tokenizers.Whitespace()), " "),
    "what a step removes": (
        lambda: of_letters(step=pre_tokenizers.Split("中", "removed")),
        "中",
    ),
    "a replacement": (lambda: bytewise(normalizers.Replace("中中中中中中", "")), "中中中中中中"),
    "accents": (
        lambda: bytewise(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
        "\u0301",
    ),
    "bytes that have no token": (without_all_bytes, "中"),
    "words": (words, "x"),
    "unigrams": (unigram, "x"),
    "a template without the text": (cut_off, "a"),
}


@pytest.mark.parametrize("kind", KEEPING)
def test_a_text_never_has_fewer_tokens_than_its_bytes_say(kind: str) -> None:
    tokenizer = KEEPING[kind]()
    most = bytes_per_token(tokenizer)
    assert most is not None
    draw = random.Random(7)
    for _ in range(300):
        pieces = draw.sample(PIECES, draw.randint(1, 4))
        text = "".join(draw.choices(pieces, k=draw.randint(1, 80)))
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special).ids
            assert len(ids) * most >= len(text.encode()), text


@pytest.mark.parametrize("kind", SHRINKING)
def test_nothing_is_said_where_a_text_can_shrink(kind: str) -> None:
    make, piece = SHRINKING[kind]
    tokenizer = make()
    text = piece * 30_000 + "<mask>" * (kind == "spaces before a token")
    assert len(tokenizer.encode(text).ids) < 10
    assert bytes_per_token(tokenizer) is None


@cache
def decomposed() -> dict[str, str]:
    """Every character, and the signs that it decomposes to."""
    decompose = normalizers.NFD().normalize_str
    return {chr(one): decompose(chr(one)) for one in range(0x110000) if not 0xD800 <= one < 0xE000}


@pytest.mark.parametrize("name", COMPOSED)
def test_unicode_makes_no_text_shorter_by_more_than_the_factor(name: str) -> None:
    # What a text's characters decompose to stands for at most so many bytes, sign by sign; and a
    # composed character is put together of nothing else.
    compose = normalizers.NFC().normalize_str
    parts = decomposed()
    most: dict[str, int] = {}
    for one, made in parts.items():
        if len(made) == 1:
            most[made] = max(most.get(made, 0), len(one.encode()))
    for one, made in parts.items():
        assert len(one.encode()) <= sum(most[sign] for sign in made)
        if name == "NFD" or compose(one) == one:
            signs = [one] if name == "NFC" else list(made)
            size = sum(most[sign] for sign in made)
            assert size <= COMPOSED[name] * len("".join(signs).encode())


def test_a_text_that_is_too_long_by_its_bytes_is_not_encoded() -> None:
    class Counting(Tokenization):
        count = 0

        def encode_here(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
            self.count += 1
            return super().encode_here(text, special_tokens=special_tokens)

    tokenization = Counting(bytewise())
    longest = bytes_per_token(tokenization.raw)
    assert longest is not None
    with pytest.raises(TooManyTokensError) as found:
        tokenization.encode("x" * (longest * 100 + 1), most=100)
    assert (found.value.num_tokens, found.value.is_least, tokenization.count) == (101, True, 0)
    with pytest.raises(TooManyTokensError) as found:
        tokenization.encode("x" * 101, most=100)
    assert (found.value.num_tokens, found.value.is_least, tokenization.count) == (101, False, 1)
    assert len(tokenization.encode("x" * 100, most=100)) == 100
