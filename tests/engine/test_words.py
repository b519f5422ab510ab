"""What the tokens of both kinds of tokenizers say in bytes, and texts that go on behind a token."""

import zlib
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.words import TokenizerWords, UnknownKind, shared, unpacked
from proto.installation import MODELS
from tests.tiny_tokenizer import sentencepiece_tokenizer

SPACE = "\u2581"


def unigram() -> Tokenizer:
    """Pieces of some words, and bytes for everything else."""
    pieces = ["the", "ca", "cat", "s", " ", "  ", "    ", "at", "\n", "def", " the", " cat"]
    vocabulary = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    vocabulary += [(piece.replace(" ", SPACE), -len(piece) / 4) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def lower() -> Tokenizer:
    """A tokenizer that does not keep capital letters."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), tokenizer.normalizer])
    return tokenizer


MAKERS = {
    "byte-level": lambda: Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json")),
    "sentencepiece": sentencepiece_tokenizer,
    "unigram": unigram,
}


@cache
def words(kind: str) -> TokenizerWords:
    return TokenizerWords(MAKERS[kind]())


def said(kind: str, ids: tuple[int, ...]) -> bytes:
    return b"".join(words(kind).bytes_of[id_] or b"?" for id_ in ids)


LETTERS = st.sampled_from("the cat\n 0.,äß€😀é\u0301\t") | st.characters(codec="utf-8")
TEXTS = st.text(LETTERS, max_size=24)
KINDS = pytest.mark.parametrize("kind", MAKERS)


@KINDS
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_what_follows_a_token_begins_just_there_and_says_all(kind: str, text: str) -> None:
    assert said(kind, words(kind).following(text.encode())) == text.encode()


@KINDS
@given(text=TEXTS, start=st.integers(0, 12), end=st.integers(0, 12))
@settings(max_examples=150, deadline=None)
def test_a_text_that_is_cut_within_characters_is_said_byte_by_byte(
    kind: str, text: str, start: int, end: int
) -> None:
    cut = text.encode()[start : len(text.encode()) - end]
    assert said(kind, words(kind).following(cut)) == cut


@KINDS
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_a_whole_text_is_read_as_its_tokenizer_does(kind: str, text: str) -> None:
    ids, ends = words(kind).read(text.encode())
    assert ids == MAKERS[kind]().encode(text, add_special_tokens=False).ids
    assert ends == sorted(ends)
    assert not ends or ends[-1] == len(text.encode())


def test_where_tokens_end_is_counted_in_bytes() -> None:
    ids, ends = words("byte-level").read("def ä(x):".encode())
    assert (words("byte-level").bytes_of[ids[0]], ends[0]) == (b"def", 3)
    assert ends[-1] == 10


def test_bytes_that_begin_a_character_are_read_one_by_one() -> None:
    for kind in MAKERS:
        ids, ends = words(kind).read("at😀".encode()[:-1])
        assert said(kind, tuple(ids)).lstrip() == b"at\xf0\x9f\x98"
        assert ends[-3:] == [3, 4, 5]


def test_a_tokenizer_that_changes_the_text_still_says_where_its_tokens_end() -> None:
    found = TokenizerWords(lower())
    ids, ends = found.read(b"The Cat")
    assert [found.bytes_of[id_] for id_ in ids] == [b" the", b" cat"]
    assert ends == [3, 7]


def test_special_tokens_say_nothing() -> None:
    target = words("byte-level")
    assert target.bytes_of[0] is None
    assert target.specials == {0: "<|endoftext|>"}
    assert words("sentencepiece").starts == (1,)


def test_longer_tokens_are_found_by_their_beginning() -> None:
    target = words("byte-level")
    found = dict(target.beginning_with(b" retur"))
    assert found[b" return"] == target.id_of(b" return")
    assert all(word.startswith(b" retur") for word in found)


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    whole_words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    whole_words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UnknownKind):
        TokenizerWords(whole_words)


def test_a_tokenizer_is_packed_and_unpacked() -> None:
    data = zlib.compress(unigram().to_str().encode())
    assert unpacked(data).get_vocab() == unigram().get_vocab()
    for wrong in (b"", b"garbage", zlib.compress(b"{}"), data[:-40]):
        with pytest.raises(UnknownKind):
            unpacked(wrong)


def test_vocabularies_are_compared_by_what_their_tokens_say() -> None:
    target = words("byte-level")
    same = shared(target, target)
    assert (same.vocabulary, same.sample) == (1.0, 1.0)
    less = shared(words("unigram"), target)
    assert 0 < less.vocabulary < 0.1
    assert less.sample < 0.5
