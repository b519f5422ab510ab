"""A grammar begins behind the thoughts, also where their marks are special tokens."""

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


def tokenizer_with(marks: Marks, *, special: bool) -> Tokenizer:
    """A tokenizer to which the marks are special tokens, or letters like others."""
    tokenizer = sentencepiece_tokenizer()
    if special:
        names = (marks.opening, marks.closing)
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return tokenizer


def follow(tokenizer: Tokenizer, grammar: str, text: str) -> bool | None:
    """True if the grammar allows the text and its end, False if only the text, None if neither.

    The matcher is moved back everywhere, as it is where drafts are rejected.
    """
    known = Vocabulary(tokenizer)
    matcher = known.matcher(grammar)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
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
@pytest.mark.parametrize("special", [False, True], ids=["letters", "special tokens"])
@pytest.mark.parametrize("marks", READERS.values(), ids=READERS)
def test_what_a_grammar_demands_comes_behind_the_thoughts(
    marks: Marks, *, special: bool, form: str
) -> None:
    tokenizer = tokenizer_with(marks, special=special)
    ids = {name: number for name, number in tokenizer.get_vocab().items() if special}
    make, text = FORMS[form]
    begin, end = marks.opening, marks.closing

    def allowed(answer: str, *, is_open: bool) -> bool | None:
        grammar = behind_thoughts(Thoughts(marks, is_open), make(), ids)
        return follow(tokenizer, grammar, answer)

    assert allowed(f"so {end[:3]}/é🙂{{ {end}\n\n{text}", is_open=True)
    assert allowed(f"{end}{text}", is_open=True)
    assert allowed(text, is_open=True) is False
    assert allowed(f"so{end}other", is_open=True) is None
    assert allowed(text, is_open=False)
    assert allowed(f" {begin}so\n{end} {text}", is_open=False)
    assert allowed(f"{begin}so {text}", is_open=False) is False
    assert allowed("other", is_open=False) is None
