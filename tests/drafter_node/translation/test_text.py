"""A text in two vocabularies: what is settled, what is its tail, and which drafts are made."""

from collections.abc import Sequence
from dataclasses import replace
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_node.compute import ChoicePoint
from drafter_node.translation.text import Languages, Translation, Unsettled
from proto.messages import Ack, Limits, Rule, SamplingSpec, Verdict
from proto.tree import SpeculationTree, path_hash
from tests.texts import draft, key_of, opening, verdict
from tests.words import ToyWords

# The target writes words whole, the drafter in syllables, and one of its tokens is two of them.
TARGET = ToyWords(["a", "b", "c", " ", "ab", "abc", " ab"], ("<eos>", "<user>"))
OWN = ToyWords(["a", "b", "c", " ", "bc", "c ab", *"<user>"], ("<eos>",))
EOS, USER, OWN_EOS = 7, 8, 12
LANGUAGES = Languages(OWN, TARGET, (OWN_EOS,))


def translation(*tokens: int, max_len: int = 100, rule: Rule = Rule.COUPLED) -> Translation:
    opened = replace(
        opening(*tokens, limits=Limits(max_len, (EOS,))),
        sampling=SamplingSpec(temperature=0.5, seed=3, repetition_penalty=1.5),
        rule=rule,
    )
    return Translation(opened, LANGUAGES, 60)


def ids(words: ToyWords, *said: bytes) -> tuple[int, ...]:
    found = [words.id_of(one) for one in said]
    assert None not in found
    return tuple(one for one in found if one is not None)


class Machine:
    """The drafter's machine as far as a translation needs it: its text and its tree."""

    def __init__(self, translated: Translation) -> None:
        self.translated = translated
        self.tree = SpeculationTree(key_of(1), translated.opened.tokens, max_nodes=256)
        self.number = 0

    def hears(self, *tokens: int) -> Verdict:
        told = verdict(self.translated.speech.text.tokens, *tokens, acked=3)
        own = self.translated.verdict(told, self.tree)
        assert own is not None
        news = self.tree.news(own.base_len, own.base_hash, own.tokens)
        assert news is not None
        self.tree.advance(news)
        return own

    def drafts(self, *said: bytes, chance: float = 0.5, done: bool = False) -> list[bytes]:
        """Draft these tokens behind the tail; returns the drafts in the target's tokens."""
        path = [*self.translated.tail.tokens, *ids(OWN, *(one for one in said if one != b"<eos>"))]
        path += [OWN_EOS] * (b"<eos>" in said)
        num_tail = len(self.translated.tail.tokens)
        scores = [0.0 if index < num_tail else log(chance) for index in range(len(path))]
        return self.says(path, scores, done=done)

    def says(
        self, path: Sequence[int], scores: Sequence[float], *, done: bool = False
    ) -> list[bytes]:
        """Draft this path below the root; returns the drafts in the target's tokens."""
        above = self.tree.root
        for token, score in zip(path, scores, strict=True):
            self.tree.grow(above, (token,), (score,), 0)
            above = path_hash(above, token, key_of(1))
        self.number += 1
        message = draft(self.tree.text.tokens, *path, number=self.number, done=done)
        self.said = self.translated.draft(message, self.tree)
        return [TARGET.bytes_of[token] or b"<eos>" for token in self.said.tokens]


def own_text(translated: Translation, tree: SpeculationTree) -> bytes:
    tokens = [*tree.text.tokens, *translated.tail.tokens]
    return b"".join(OWN.bytes_of[token] or b"<eos>" for token in tokens)


def test_the_last_word_is_not_settled() -> None:
    translated = translation(*ids(TARGET, b"abc", b" ab"))
    assert translated.opened.tokens == ids(OWN, b"a", b"bc")
    assert translated.tail.tokens == ids(OWN, b" ", b"a", b"b")
    assert translated.tail.said == b" ab"


def test_what_looks_at_token_ids_is_left_out_of_the_sampling() -> None:
    sampling = translation(*ids(TARGET, b"abc")).opened.sampling
    assert (sampling.temperature, sampling.seed) == (0.5, 3)
    assert not sampling.has_processors


def test_the_last_tokens_change_with_the_text() -> None:
    machine = Machine(translation(*ids(TARGET, b"abc", b" ab")))
    assert machine.translated.tail.tokens[-1:] == ids(OWN, b"b")
    machine.hears(*ids(TARGET, b"c"))
    assert machine.translated.tail.tokens == ids(OWN, b" ", b"a", b"bc")
    settled = machine.hears(*ids(TARGET, b" "))
    assert settled.tokens == ids(OWN, b" ", b"a", b"bc")
    assert settled.acks == (Ack(0, 1, 3),)
    assert machine.translated.tail.tokens == ids(OWN, b" ")


def test_special_tokens_are_matched_by_role_and_others_read_as_they_are_written() -> None:
    machine = Machine(translation(USER, *ids(TARGET, b"abc", b" ")))
    assert own_text(machine.translated, machine.tree) == b"<user>abc "
    assert OWN_EOS not in machine.tree.text.tokens


def test_ids_that_are_no_token_say_nothing() -> None:
    assert LANGUAGES.heard(len(TARGET) + 3, (EOS,)) == b""
    gap = ToyWords(["a"], ("<eos>",))
    gap.specials = {}
    assert Languages(OWN, gap, (OWN_EOS,)).heard(1, ()) == b""


def test_a_text_without_spaces_is_settled_too() -> None:
    machine = Machine(translation(*[1] * 30))
    assert len(machine.translated.tail.tokens) == 8
    machine.hears(*[1] * 16)
    assert len(machine.translated.tail.tokens) == 24
    machine.hears(1)
    assert len(machine.translated.tail.tokens) == 8


def test_a_token_that_may_become_a_longer_one_is_not_drafted_yet() -> None:
    machine = Machine(translation(*ids(TARGET, b"abc", b" ")))
    assert machine.drafts(b"a", b"bc") == []
    assert machine.drafts(b"a", b"bc", b" ") == [b"abc"]
    assert machine.said.scores == pytest.approx([2 * log(0.5)])
    assert machine.said.parent_len == 2
    assert machine.said.parent_hash == machine.translated.speech.root


def test_when_no_more_comes_the_last_token_is_drafted_too() -> None:
    machine = Machine(translation(*ids(TARGET, b"abc", b" ")))
    assert machine.drafts(b"a", b"b", done=True) == [b"ab"]


def test_a_drafts_score_is_that_of_its_own_part_of_the_path() -> None:
    machine = Machine(translation(*ids(TARGET, b"abc", b" ")))
    assert machine.drafts(b"a", b"b", b" ", b"c", done=True) == [b"ab", b" ", b"c"]
    assert machine.said.scores == pytest.approx([2 * log(0.5), log(0.5), log(0.5)])


def test_a_drafters_token_may_be_several_of_the_targets() -> None:
    machine = Machine(translation(*ids(TARGET, b"abc", b" ", b"a")))
    assert machine.drafts(b"c ab", b"c", b" ", chance=0.9) == [b"c", b" ab", b"c"]


def test_only_new_drafts_are_sent_again() -> None:
    machine = Machine(translation(*ids(TARGET, b"abc", b" ")))
    machine.drafts(b"a", b"b", b" ")
    assert machine.drafts(b"a", b"b", b" ", b"c", b"c") == [b" ", b"c"]
    assert machine.said.parent_len == 3, "they hang on a draft that the target has"


def test_a_path_that_contradicts_the_text_says_nothing() -> None:
    machine = Machine(translation(*ids(TARGET, b"abc", b" ")))
    assert machine.drafts(b"a", b"bc", b" ") == [b"abc"]
    machine.hears(*ids(TARGET, b"b"))
    path = ids(OWN, b" ", b"a", b"bc", b" ")
    assert machine.says(path, (0.0,) * 4) == []
    assert machine.translated.place(path) == ChoicePoint(3, b"")


def test_under_a_classical_rule_nothing_is_drafted() -> None:
    for rule in (Rule.TOKEN, Rule.BLOCK):
        opened = translation(*ids(TARGET, b"abc", b" "), rule=rule).opened
        assert (opened.rule, opened.policy.window) == (Rule.COUPLED, 0)


def test_the_end_of_the_text_is_the_targets_token_for_it() -> None:
    machine = Machine(translation(*ids(TARGET, b"abc", b" ")))
    assert machine.drafts(b"a", b"b", b"<eos>") == [b"ab", b"<eos>"]
    assert machine.said.tokens[-1] == EOS


def test_nothing_is_drafted_behind_the_last_place_of_a_text() -> None:
    machine = Machine(translation(*ids(TARGET, b"abc", b" "), max_len=3))
    assert machine.drafts(b"a", b"b", b" ", b"c", b"c") == []
    machine = Machine(translation(*ids(TARGET, b"abc", b" "), max_len=4))
    assert machine.drafts(b"a", b"b", b" ", b"c", b"c") == [b"ab"]


def test_where_the_target_is_when_the_drafter_chooses() -> None:
    translated = translation(*ids(TARGET, b"abc", b" "))
    tail = translated.tail.tokens
    assert translated.place(tail) == ChoicePoint(2, b"")
    assert translated.place(()) == ChoicePoint(2, b"", b" ")
    assert translated.place([*tail, *ids(OWN, b"a")]) == ChoicePoint(2, b"a")
    assert translated.place([*tail, *ids(OWN, b"a", b"b", b" ")]) == ChoicePoint(3, b" ")


def test_a_message_that_was_missed_is_noticed() -> None:
    machine = Machine(translation(*ids(TARGET, b"abc", b" ")))
    message = replace(verdict(machine.translated.speech.text.tokens, 1), base_len=9)
    assert machine.translated.verdict(message, machine.tree) is None


TOKENS = st.integers(0, len(TARGET) - 3)


@given(prompt=st.lists(TOKENS, min_size=1, max_size=8), news=st.lists(st.lists(TOKENS, max_size=4)))
@settings(deadline=None, max_examples=300)
def test_both_texts_always_say_the_same(prompt: list[int], news: Sequence[list[int]]) -> None:
    machine = Machine(translation(*prompt))
    for tokens in news:
        text = machine.translated.speech.text
        try:
            machine.hears(*tokens)
        except Unsettled:
            # The first token is settled in any case, and "c ab" makes one word of two.
            machine = Machine(translation(*text.tokens))
        said = b"".join(TARGET.bytes_of[token] or b"" for token in text.tokens)
        assert own_text(machine.translated, machine.tree) == said
        assert said.endswith(machine.translated.tail.said)
        whole = OWN.read(said)[0]
        assert [*machine.tree.text.tokens, *machine.translated.tail.tokens] == whole
        machine.translated.speech.check()
