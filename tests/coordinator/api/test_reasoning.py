"""A grammar begins behind the thoughts, also where their marks are special tokens."""

import re

import pytest
from tokenizers import AddedToken, Tokenizer

from coordinator.api.grammars import behind_thoughts
from coordinator.api.reasoning import READERS, Marks, Thoughts
from tests.tiny_tokenizer import sentencepiece_tokenizer

pytest.importorskip("llguidance")

from engine.choice import vocabulary
from engine.choice.vocabulary import Vocabulary

FORMS = {
    "json": (
        lambda: vocabulary.of_json_schema('{"type": "array", "items": {"type": "integer"}}'),
        "[1, 2]",
    ),
    "regex": (lambda: vocabulary.of_regex("[ab]+"), "abba"),
    "lark": (lambda: vocabulary.of_lark('start: "x" | "y"'), "y"),
}


def tokenizer_with(marks: Marks, kind: str) -> Tokenizer:
    """A tokenizer to which the marks are special tokens, added ones, or letters like others."""
    tokenizer = sentencepiece_tokenizer()
    names = (marks.opening, marks.closing)
    if kind == "special tokens":
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    elif kind == "added tokens":
        tokenizer.add_tokens([AddedToken(name, special=False) for name in names])
    return tokenizer


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of the bytes of a text."""
    names = [f"<0x{byte:02X}>" for byte in text.encode()]
    return [number for name in names if (number := tokenizer.token_to_id(name)) is not None]


def tokens_of(tokenizer: Tokenizer, text: str, marks: Marks) -> list[int]:
    """The tokens of a text: those of the marks, if the tokenizer has them, and else its bytes."""
    tokens: list[int] = []
    for part in re.split(f"({re.escape(marks.opening)}|{re.escape(marks.closing)})", text):
        number = tokenizer.token_to_id(part)
        is_mark = number is not None and part in (marks.opening, marks.closing)
        tokens += [number] if is_mark else letters(tokenizer, part)
    return tokens


def follow(tokenizer: Tokenizer, grammar: str, tokens: list[int]) -> bool | None:
    """True if a grammar allows a text and its end, False if only the text, None if neither.

    The matcher is moved back everywhere, as it is where drafts are rejected.
    """
    known = Vocabulary(tokenizer)
    matcher = known.matcher(grammar)
    for token in tokens:
        if not matcher.try_consume_tokens([token]):
            return None
        assert matcher.rollback(1)
        assert matcher.compute_bitmask()
        assert not matcher.is_error()
        assert matcher.try_consume_tokens([token])
    may_end = int.from_bytes(matcher.compute_bitmask(), "little") >> known.size & 1
    for _ in tokens:
        assert matcher.rollback(1)
        assert matcher.compute_bitmask()
        assert not matcher.is_error()
    return bool(may_end)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["letters", "added tokens", "special tokens"])
@pytest.mark.parametrize("marks", READERS.values(), ids=READERS)
def test_what_a_grammar_demands_comes_behind_the_thoughts(
    marks: Marks, kind: str, form: str
) -> None:
    tokenizer = tokenizer_with(marks, kind)
    ids = {} if kind == "letters" else tokenizer.get_vocab()
    make, text = FORMS[form]
    begin, end = marks.opening, marks.closing

    def allowed(answer: str, *, is_open: bool) -> bool | None:
        grammar = behind_thoughts(Thoughts(marks, is_open), make(), ids)
        return follow(tokenizer, grammar, tokens_of(tokenizer, answer, marks))

    assert allowed(f"so {end[:3]}/é🙂{{ {end}\n\n{text}", is_open=True)
    assert allowed(f"{end}{text}", is_open=True)
    assert allowed(text, is_open=True) is False
    assert allowed(f"so{end}other", is_open=True) is None
    assert allowed(text, is_open=False)
    assert allowed(f"{begin}so\n{end} {text}", is_open=False)
    assert allowed(f"{begin}so {text}", is_open=False) is False
    assert allowed("other", is_open=False) is None
    assert allowed(f" {text}", is_open=False) is None
    if kind != "letters":  # a mark may also be written letter by letter
        closing = tokenizer.token_to_id(end)
        spelt = letters(tokenizer, f"so{end}")
        assert closing not in spelt
        grammar = behind_thoughts(Thoughts(marks, is_open=True), make(), ids)
        matcher = Vocabulary(tokenizer).matcher(grammar)
        assert matcher.try_consume_tokens(spelt) == len(spelt)
        allowed_ids = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not allowed_ids >> closing & 1, "the thoughts have ended already"
