"""What a streamed text tells of its tokens: their parts of the text, origins, rejected drafts."""

import gc

from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.outputs import Assembly
from coordinator.api.speculation import ShownToken, SpeculationPart, TokenTexts
from coordinator.text.detokenization import Ending
from coordinator.text.session_events import Emit
from tests.coordinator.words import Words

WORDS = Words({1: "one", 2: " two", 3: " three", 8: " no", 9: "."})


def told(emits: list[Emit], *stops: str) -> tuple[list[ShownToken], str, list[int]]:
    """The tokens that are told for these passes; the text and the token ids."""
    assembly = Assembly("p", (5,), 7, WORDS, ending=Ending(strings=stops), token_texts=TokenTexts())
    tokens: list[ShownToken] = []
    for emit in emits:
        if assembly.is_stopped:
            break
        (part,) = assembly.push(emit).outputs
        assert part.speculation is not None
        tokens += part.speculation.tokens
    (last,) = assembly.finish("length", None).outputs
    assert last.speculation is not None
    (whole,) = assembly.whole().outputs
    return [*tokens, *last.speculation.tokens], whole.text, whole.token_ids


def test_each_token_has_its_origin_and_what_was_rejected_in_its_place() -> None:
    tokens, text, _ = told([Emit((1, 2, 3), 2, 4, (8, 9), sources=(0, 1))])
    assert tokens == [
        ShownToken(1, "one", "draft:model"),
        ShownToken(2, " two", "draft:ngram"),
        ShownToken(3, " three", "recovered", rejected=" no."),
    ]
    assert text == "one two three"


def test_a_token_is_told_when_its_text_is_shown() -> None:
    assembly = Assembly(
        "p", (5,), 7, WORDS, ending=Ending(strings=(" two.",)), token_texts=TokenTexts()
    )
    parts = [assembly.push(Emit((token,), 0, 0, ())).outputs[0] for token in (1, 2, 3)]
    shown = [
        [one.token_id for one in part.speculation.tokens] for part in parts if part.speculation
    ]
    assert shown == [[1], [], [2, 3]]
    assert [part.text for part in parts] == ["one", "", " two three"]


def test_what_was_told_is_not_kept() -> None:
    def num_kept() -> int:
        gc.collect()
        return sum(type(one) is SpeculationPart for one in gc.get_objects())

    gc.freeze()  # what other tests have left is not looked at
    before = num_kept()
    assembly = Assembly("p", (5,), 7, WORDS, token_texts=TokenTexts())
    for _ in range(5):
        assembly.push(Emit((1,), 0, 0, ()))
    assembly.finish("length", None)
    assert num_kept() == before
    assert assembly.whole().outputs[0].speculation is None


@given(
    st.lists(st.lists(st.sampled_from((1, 2, 3, 9)), min_size=1, max_size=4), max_size=6),
    st.lists(st.sampled_from(("ne t", " thr", "e.", "two t", "..")), max_size=2),
)
def test_their_texts_together_are_the_text_wherever_it_stops(
    passes: list[list[int]], stops: list[str]
) -> None:
    emits = [Emit(tuple(tokens), len(tokens) - 1, len(tokens), (8,)) for tokens in [[1], *passes]]
    tokens, text, ids = told(emits, *stops)
    assert "".join(token.text for token in tokens) == text
    assert [token.token_id for token in tokens] == ids
