"""Masks of grammars against a version that tries every continuation from scratch."""

import re
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.choice.allowed import Allowed
from engine.choice.classical_rules import Distribution, block_trial, token_trial
from engine.choice.coupling import choose
from engine.choice.grammar import WORD, GrammarMask, masked_there
from engine.choice.judging import distributions
from engine.choice.path import Path
from engine.choice.processors import Processors
from engine.choice.sampling import Sampling
from engine.choice.vocabulary import (
    Vocabulary,
    of_json_schema,
    of_lark,
    of_regex,
    read_vocabulary,
)
from engine.errors import GrammarError
from proto.installation import ROOT
from tests.engine.choice.test_classical_rules import Model, Rule, distance, exact, joint
from tests.engine.choice.test_processors import Shape

pytest.importorskip("llguidance")

# Tokens of one and of several letters, so that a text is written in several ways.
WORDS = ["<end>", "a", "b", "c", "ab", "bc", "abc", "ca", "aa", "x"]
END = 0
VOCAB = len(WORDS) + 3  # the model has more logits than the tokenizer has tokens
LONGEST = 6
PATTERNS = ["(ab|c)*", "a(b|bc)?c{0,3}", "(aa|ab|ca){1,2}x?", "abc", "[abc]{2,5}", "x|a*b"]


def tokenizer() -> Tokenizer:
    """One whose tokens are WORDS; the first is special."""
    words = {word: number for number, word in enumerate(WORDS)}
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "a"), ("a", "a")]
    made = Tokenizer(models.BPE(words, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([WORDS[END]])
    return made


VOCABULARY = Vocabulary(tokenizer())
LANGUAGES = {
    pattern: {
        "".join(letters)
        for length in range(2 * LONGEST)
        for letters in product("abcx" if length <= LONGEST else "", repeat=length)
        if re.fullmatch(pattern, "".join(letters))
    }
    for pattern in PATTERNS
}


def allowed(pattern: str, made: list[int]) -> set[int]:
    """The tokens that may follow, by all short texts of the language; `made` must be short."""
    text = "".join(WORDS[token] for token in made)
    language = LANGUAGES[pattern]
    found = {
        number
        for number, word in enumerate(WORDS)
        if number != END and any(one.startswith(text + word) for one in language)
    }
    return found | ({END} if text in language else set())


def is_forced(pattern: str, made: list[int]) -> bool:
    """True if only one letter may follow: then the library allows only the usual token for it."""
    text = "".join(WORDS[token] for token in made)
    longer = {one[len(text)] for one in LANGUAGES[pattern] if one.startswith(text) and one != text}
    return len(longer) == 1 and text not in LANGUAGES[pattern]


def mask_of(pattern: str, num_logits: int = VOCAB) -> GrammarMask:
    """The processor of one text."""
    return GrammarMask(VOCABULARY, of_regex(pattern), [END], num_logits)


def kept(row: np.ndarray) -> set[int]:
    """The tokens that a processed row of zeros allows."""
    return set(np.flatnonzero(np.isfinite(row)).tolist())


def test_of_what_fits_only_allowed_tokens_may_come_and_none_is_an_error() -> None:
    pattern, text = PATTERNS[0], [7, 7]
    fits = allowed(pattern, [])
    for kept_ids in (sorted(fits)[:1], [*sorted(fits)[:1], VOCAB - 1]):
        words = Allowed(np.array(kept_ids), VOCAB).words
        mask = GrammarMask(VOCABULARY, of_regex(pattern), [END], VOCAB, words)
        row = np.zeros(VOCAB, dtype=np.float32)
        mask(Path(text, 2, ()), row)
        assert kept(row) == fits & set(kept_ids)
        rows = mask.there([Path(text, 2, ())], torch.zeros(1, VOCAB))
        assert np.array_equal(rows.numpy()[0], row)
    others = sorted(set(range(VOCAB)) - fits)[:1]
    mask = GrammarMask(
        VOCABULARY, of_regex(pattern), [END], VOCAB, Allowed(np.array(others), VOCAB).words
    )
    with pytest.raises(GrammarError, match="no token may follow"):
        mask.masks([Path(text, 2, ())])


trees = st.lists(st.lists(st.integers(0, len(WORDS)), max_size=3).map(tuple), max_size=6)


@settings(max_examples=60)
@given(st.sampled_from(PATTERNS), st.data())
def test_rows_of_trees_are_those_of_the_dumb_version_whatever_was_committed(
    pattern: str, data: st.DataObject
) -> None:
    """Each pass has a tree of paths, allowed or not, in any order; then some tokens are committed.

    Only short texts are asked about: the language of the dumb version has no long ones.
    """
    mask, text = mask_of(pattern), [7, 7]
    for _ in range(3):
        made = text[2:]
        paths = [(), *data.draw(trees)]
        rows = np.zeros((len(paths), VOCAB), dtype=np.float32)
        asked = [Path(text, 2, path) for path in paths]
        mask.on_host(asked, rows)
        there = mask.there(asked, torch.zeros(len(paths), VOCAB))
        assert np.array_equal(there.numpy(), rows)
        for path, row in zip(paths, rows, strict=True):
            before = [*made, *path]
            if sum(len(WORDS[t]) for t in before if t < len(WORDS)) > LONGEST - 3:
                continue
            steps = range(len(made), len(before))
            if all(before[i] in allowed(pattern, before[:i]) for i in steps) and END not in before:
                right = allowed(pattern, before)
                if is_forced(pattern, before):
                    assert set() < kept(row) <= right, (made, path)
                else:
                    assert kept(row) == right, (made, path)
            else:  # such a row is never looked at
                assert kept(row) == set(range(VOCAB))
        choices = sorted(allowed(pattern, made) - {END})
        if not choices or sum(len(WORDS[t]) for t in made) > LONGEST - 5:
            break
        text.append(data.draw(st.sampled_from(choices)))


SCHEMA = """{"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 4}, "kind": {"enum": ["red", "rosy", "blue"]},
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 1}
}, "required": ["name", "kind", "list"], "additionalProperties": false}"""
EMBEDDED = "models/target"


@settings(max_examples=10)
@given(st.integers(0, 1000))
def test_a_mask_is_the_same_wherever_the_matcher_has_been_before(seed: int) -> None:
    """With real tokens: of a walk through an answer, with steps aside, and each row made alone."""
    vocabulary = read_vocabulary(ROOT / EMBEDDED)
    assert vocabulary is not None
    grammar, random = of_json_schema(SCHEMA), np.random.default_rng(seed)
    walking, text = GrammarMask(vocabulary, grammar, [0], 4096), [5]
    for _ in range(30):
        rows, path = np.zeros((1, 4096), dtype=np.float32), list[int]()
        for _ in range(random.integers(1, 4)):  # a tree of a few paths
            drafted = tuple(path[: random.integers(len(path) + 1)])
            rows[:] = 0.0
            walking.on_host([Path(text, 1, drafted)], rows)
            alone = np.zeros((1, 4096), dtype=np.float32)
            whole = Path([*text, *drafted], 1, ())
            GrammarMask(vocabulary, grammar, [0], 4096).on_host([whole], alone)
            assert np.array_equal(rows, alone)
            choices = sorted(kept(rows[0]) - {0})
            if not choices:
                return
            path = [*drafted, int(random.choice(choices))]
        text.append(path[0])


def test_the_end_is_allowed_only_where_the_grammar_accepts_and_nothing_is_forbidden_behind_it() -> (
    None
):
    mask = mask_of("ab")
    rows = np.zeros((4, VOCAB), dtype=np.float32)
    mask.on_host([Path([7], 1, path) for path in ((), (4,), (4, END), (4, END, 9))], rows)
    assert [kept(row) for row in rows[:2]] == [{4}, {END}]
    assert all(kept(row) == set(range(VOCAB)) for row in rows[2:])


def test_several_end_tokens_and_logits_fewer_than_tokens() -> None:
    mask = GrammarMask(VOCABULARY, of_regex("a?"), [END, 3, VOCAB + 5], 5)
    row = np.zeros(5, dtype=np.float32)
    mask(Path([7], 1, ()), row)
    assert kept(row) == {END, 1, 3}  # c ends texts here, and is no letter any more


def test_where_other_bans_leave_nothing_the_grammar_still_holds() -> None:
    shape = Shape(banned=((4,), (1,)), grammar=of_regex("a[bc]"), end_ids=(END,))
    processors = Processors(shape, [7], 1, VOCAB, VOCABULARY)
    logits = torch.randn(1, VOCAB)
    for row in (
        processors.apply(logits, [()])[0],
        processors.apply_there(logits, [Path([7], 1, ())])[0],
    ):
        assert kept(row.numpy()) == {1, 4}
        assert torch.equal(row[[1, 4]], logits[0, [1, 4]])


def test_a_mask_of_words_is_unpacked_bit_by_bit() -> None:
    size = WORD + 8
    words = np.array([[-(2**31) + 5, 2], [-1, -1]], dtype=np.int32)
    rows = masked_there(words, torch.zeros(2, size))
    assert kept(rows[0].numpy()) == {0, 2, WORD - 1, WORD + 1}
    assert kept(rows[1].numpy()) == set(range(size))


SMALL = 4  # the end and three letters


def model_of(seed: int, pattern: str | None) -> Model:
    """Distributions of random logits after every answer, held to a pattern if there is one."""
    shape = Shape(grammar=of_regex(pattern) if pattern else "", end_ids=(END,))

    @cache
    def model(made: tuple[int, ...]) -> Distribution:
        generator = torch.Generator().manual_seed(hash((seed, *made)) % 2**31)
        logits = torch.randn(1, SMALL, generator=generator)
        rows = Processors(shape, [3], 1, SMALL, VOCABULARY).apply(logits, [made])
        return distributions(rows.numpy(), Sampling(1.0))[0]

    return model


@pytest.mark.parametrize("rule", [token_trial, block_trial])
@pytest.mark.parametrize("pattern", ["[abc]{1,2}", "(a|bc)*", "b[ac]?"])
@pytest.mark.parametrize("drafter", ["held", "not held"])
def test_the_classical_rules_write_the_targets_distribution_under_the_mask(
    rule: Rule, pattern: str, drafter: str
) -> None:
    """Also if the drafter cannot follow the grammar, and its drafts are forbidden."""
    p, q = model_of(1, pattern), model_of(2, pattern if drafter == "held" else None)
    target = exact(p, SMALL, 3)
    assert distance(joint(rule, p, q, 2, SMALL, 3), target) < 1e-9
    for made, chance in target.items():
        text = "".join(WORDS[token] for token in made[: [*made, END].index(END)])
        assert chance == 0.0 or END not in made or re.fullmatch(pattern, text)


def test_the_coupled_choice_is_always_one_that_the_grammar_allows() -> None:
    processors = Processors(
        Shape(grammar=of_regex("[abc]{2,5}"), end_ids=(END,)), [7], 1, VOCAB, VOCABULARY
    )
    rows = processors.apply(torch.randn(1, VOCAB).repeat(3, 1), [(), (1,), (1, 4)])
    for seed in range(20):
        chosen = choose(rows, Sampling(1.0), seed, 0, [1, 2, 3])
        paths: list[list[int]] = [[], [1], [1, 4]]
        assert all(
            token in allowed("[abc]{2,5}", path) for token, path in zip(chosen, paths, strict=True)
        )


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (of_regex("(a"), "unclosed group"),
        (of_regex("(?=a)b"), "look-around"),
        (of_json_schema('{"type":"wat"}'), "Invalid type: wat"),
        (of_lark('start: "a" foo'), 'unknown name: "foo"'),
        (of_json_schema('{"$ref":"#"}'), "no text fits it"),
        (of_regex("((((a{50}){50}){50}){50}){50}"), "too many expressions"),
        (of_lark('start: a "b"\na[max_tokens=2]: /a+/'), "leave them out"),
        (of_lark('start: a "b"\na[stop="x"]: /a+/'), "leave them out"),
    ],
)
def test_a_bad_grammar_is_refused_in_a_few_words(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)) as caught:
        Vocabulary(tokenizer()).try_out(grammar, 16)
    assert len(str(caught.value)) < 60
    assert "\n" not in str(caught.value)


def test_without_a_vocabulary_a_grammar_cannot_be_followed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert read_vocabulary(tmp_path) is None
    with pytest.raises(GrammarError):
        Processors(Shape(grammar=of_regex("a")), [1], 1, VOCAB)


def test_what_other_answers_have_worked_out_makes_no_grammar_too_complex() -> None:
    """Matchers of a grammar share a store with a limit; here every second mask meets it."""
    mask = mask_of("(((((a{50}){50}){50}){50}){50})")
    found = [mask.masks([Path([7], 1, path)])[0, 0] for path in ((), (1,), (), (1, 8), ())]
    assert found == [1 << 8] * 5


def test_a_matcher_that_cannot_go_back_is_made_anew() -> None:
    """A node gets no such grammar from its coordinator, and would not fall over one."""
    mask = GrammarMask(VOCABULARY, of_lark('start: a "b"\na[max_tokens=2]: /a+/'), [END], VOCAB)
    found = [mask.masks([Path([7], 1, path)])[0, 0] for path in ((), (1,), (), (1, 1), (1,))]
    assert found == [found[0], found[1], found[0], 1 << 2, found[1]]


@pytest.mark.parametrize("before", ["", '%llguidance {"no_forcing": false}\n'])
def test_a_token_by_its_number_is_left_again_with_the_same_masks(before: str) -> None:
    mask = GrammarMask(VOCABULARY, of_lark(f'{before}start: "a" <[9]> "b"'), [END], VOCAB)
    paths = ((), (1,), (1, 9), (1,), (1, 9, 2), (1,), ())
    assert [kept_by(mask, path) for path in paths] == [{1}, {9}, {2}, {9}, {END}, {9}, {1}]


def test_where_no_token_may_follow_the_grammar_says_so() -> None:
    mask = GrammarMask(VOCABULARY, of_lark(f'start: "a" <[{END}]> "b"'), [END], VOCAB)
    assert kept_by(mask, ()) == {1}
    with pytest.raises(GrammarError, match="no token may follow"):
        mask.masks([Path([7], 1, (1,))])
    assert kept_by(mask, ()) == {1}


def kept_by(mask: GrammarMask, path: tuple[int, ...]) -> set[int]:
    """The tokens that a processor allows after a path."""
    row = np.zeros(VOCAB, dtype=np.float32)
    mask(Path([7], 1, path), row)
    return kept(row)


class Stuck:
    """A matcher that follows one token, and then says that the grammar is too complex."""

    def __init__(self) -> None:
        self.passed: list[int] = []

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self.passed += tokens
        return len(tokens)

    def compute_bitmask(self) -> bytes:
        return bytes([2, 0, 0, 0])

    def is_error(self) -> bool:
        return len(self.passed) > 1

    def get_error(self) -> str:
        return "limit"


def test_a_grammar_that_is_too_complex_at_some_place_is_followed_up_to_there() -> None:
    vocabulary = Vocabulary(tokenizer())
    asked: list[bool] = []

    def matcher(grammar: str, *, anew: bool = False) -> Stuck:
        asked.append(anew)
        return Stuck()

    vocabulary.matcher = matcher  # type: ignore[method-assign,assignment]
    mask = GrammarMask(vocabulary, "x", [END], VOCAB)
    assert mask.masks([Path([7], 1, (1,))])[0, 0] == 2
    with pytest.raises(GrammarError, match=r"^limit; make it simpler$"):
        mask.masks([Path([7], 1, (1, 1))])
    assert asked == [False, True, True]
    assert mask.masks([Path([7], 1, (1,))])[0, 0] == 2
