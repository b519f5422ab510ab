"""The view of a text's speculation, and the pieces of text that it is made of."""

import re

import pytest

from coordinator.api.outputs import Assembly
from coordinator.api.prompts import Tokenization
from coordinator.cli.speculation_view import ACCEPTED, SpeculationView, legend, visible
from coordinator.text.detokenization import Ending, IdStream
from coordinator.text.metrics import SOURCES, TITLES, origins
from coordinator.text.session_events import Emit
from proto.messages import EARLIER_SOURCE, HEADS_SOURCE, MODEL_SOURCE, NGRAM_SOURCE
from tests.coordinator.text.test_stops import METRICS
from tests.coordinator.words import Words
from tests.tiny_tokenizer import SPECIAL, save_bytewise_tokenizer

ALL = "." * 99  # as long as can be: nothing is held back
WORDS = Words({1: "one", 2: "\n    ", 3: " two\n", 4: "\n\n", 5: "\tthree"})


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    """A tokenizer with a token for each byte, and one special token."""
    folder = tmp_path_factory.mktemp("bytewise")
    save_bytewise_tokenizer(folder)
    made = Tokenization.of_model(str(folder), None)
    assert made is not None
    return made


def test_marks_end_at_newlines_so_that_the_layout_stays() -> None:
    view = SpeculationView(WORDS, in_colour=False)
    assert view.push(Emit((1, 2), 1, 1, ()), ALL) == "one{+⏎+}\n{+    "
    assert view.push(Emit((3,), 0, 2, (4, 5)), ALL) == "+}[-⏎⏎⇥three-]{+ two⏎+}\n"
    assert view.push(Emit((4, 5), 2, 2, ()), ALL) == "\n\n\tthree"
    assert view.finish(ALL) == ""


def test_neighbours_of_one_kind_share_their_marks_whichever_passes_they_are_of() -> None:
    view = SpeculationView(WORDS, in_colour=False)
    shown = [view.push(Emit((1,), 0, 0, ()), ALL) for _ in range(2)]
    shown.append(view.push(Emit((1, 1), 1, 1, (), sources=(NGRAM_SOURCE,)), ALL))
    assert "".join(shown) == "{+oneone+}one{+one"
    assert view.close() == "+}"
    assert view.close() == ""


def test_in_colour_a_pass_that_begins_within_a_line_is_set_apart() -> None:
    view = SpeculationView(WORDS, in_colour=True)
    own, bar = "\x1b[94mone\x1b[0m", "\x1b[2m│\x1b[0m"
    assert view.push(Emit((1,), 0, 0, ()), ALL) == own
    assert view.push(Emit((1,), 0, 0, ()), ALL) == bar + own
    # At the end of a line, and at the beginning of one, there is nothing to set apart.
    assert view.push(Emit((4,), 0, 0, ()), ALL) == "\n\n"
    assert view.push(Emit((1,), 0, 0, ()), ALL) == own
    assert view.finish(ALL) == ""


def test_colours_end_at_newlines_and_rejected_newlines_are_signs() -> None:
    view = SpeculationView(WORDS, in_colour=True)
    assert view.push(Emit((3, 1), 2, 2, ()), ALL) == "\x1b[32m two\x1b[0m\n\x1b[32mone\x1b[0m"
    assert view.push(Emit((1,), 0, 1, (3,)), ALL) == (
        "\x1b[2m│\x1b[0m\x1b[31;9m two⏎\x1b[0m\x1b[94mone\x1b[0m"
    )


def test_what_the_text_holds_back_or_cuts_off_is_not_shown_either() -> None:
    view = SpeculationView(WORDS, in_colour=False)
    ending = Ending(strings=("two\n\nthree", "etwot"))
    assembly = Assembly(None, (9,), 1, WORDS, ending=ending)
    shown = []
    for emit in (Emit((1,), 1, 1, ()), Emit((3,), 0, 2, (4, 5)), Emit((1, 5), 1, 2, (4,))):
        shown.append(view.push(emit, assembly.push(emit).outputs[0].text))
    # An "e" waits, and what stands behind it in the line waits as well.
    assert shown == ["on", "e[-⏎⏎⇥three-]{+ ", "two⏎+}\none[-⏎⏎-]{+\tthre"]
    stopped = Assembly(None, (9,), 1, WORDS, ending=Ending(strings=("wo",)))
    view = SpeculationView(WORDS, in_colour=False)
    emit, part = stopped.cut(Emit((1, 3), 1, 2, (4,)))
    assert view.push(emit, part.outputs[0].text) == "one[-⏎⏎-]{+ t"
    assert view.finish(stopped.finish("stop", METRICS).outputs[0].text) == "+}"


def test_drafts_after_an_accepted_end_of_text_are_not_shown_as_rejected() -> None:
    emit = Emit((1,), 1, 3, (5,))
    assert origins(emit) == ("draft:model",)
    assert SpeculationView(WORDS, in_colour=False).push(emit, ALL) == "one"


def test_a_bonus_whose_drafts_were_known_already_is_a_bonus() -> None:
    assert origins(Emit((1,), 0, 4, ())) == ("bonus",)
    assert origins(Emit((1, 2), 1, 4, (3,))) == ("draft:model", "recovered")
    assert origins(Emit((1, 2, 3), 0, 0, ())) == ("plain",) * 3
    two_sources = Emit((1, 2, 3), 2, 2, (), sources=(0, 1))
    assert origins(two_sources) == ("draft:model", "draft:ngram", "bonus")


def test_signs_stand_for_what_would_move_the_cursor() -> None:
    assert visible("a\n\t\r\x1b[2J é日") == "a⏎⇥··[2J é日"


def test_characters_of_several_tokens_appear_when_they_are_complete(
    bytewise: Tokenization,
) -> None:
    text = bytewise.encode("aé日")
    view = SpeculationView(bytewise.stream(()), in_colour=False)
    assert len(text) == 6
    assert view.push(Emit(text[:2], 2, 2, ()), ALL) == "a"
    assert view.push(Emit(text[2:4], 1, 2, (text[0],)), ALL) == "é[-a-]"
    assert view.push(Emit(text[4:], 1, 1, ()), ALL) == "{+日"
    assert view.finish(ALL) == "+}"


def test_rejected_pieces_of_characters_and_special_tokens_are_visible(
    bytewise: Tokenization,
) -> None:
    first, second = bytewise.encode("é")
    (special,) = bytewise.encode(SPECIAL)
    a, b = bytewise.encode("ab")
    view = SpeculationView(bytewise.stream(()), in_colour=False)
    assert view.push(Emit((a,), 0, 1, (first,)), ALL) == "[-\ufffd-]{+a"
    assert view.push(Emit((b,), 0, 3, (first, second, special)), ALL) == f"+}}[-é{SPECIAL}-]{{+b"
    assert view.push(Emit((special,), 0, 0, ()), ALL) == ""
    assert view.push(Emit((first,), 1, 1, ()), ALL) == ""
    assert view.finish(ALL) == "+}\ufffd"


def test_a_model_without_a_tokenizer_shows_its_ids() -> None:
    view = SpeculationView(IdStream(), in_colour=False)
    assert view.push(Emit((5,), 0, 2, (6, 7)), ALL) == "[-6,7-]{+5"
    assert view.push(Emit((8, 9), 1, 1, ()), ALL) == "+},8{+,9"


def test_the_legend_fits_80_columns() -> None:
    assert len(legend(in_colour=False)) <= 80
    assert "[-rejected draft-]" in legend(in_colour=False)
    shown = legend(in_colour=True)
    assert "n-gram" not in legend(in_colour=True, drafter_only=True)
    assert "\x1b[31;9mrejected draft\x1b[0m" in shown
    assert len(re.sub("\x1b\\[[0-9;]*m", "", shown)) <= 80
    for colour, title in ((32, "drafter"), (36, "n-gram"), (33, "earlier text"), (35, "heads")):
        assert f"\x1b[{colour}m{title}\x1b[0m" in shown
    assert set(TITLES) == set(SOURCES.values()) == set(ACCEPTED)


def test_every_source_has_a_colour_of_its_own() -> None:
    view = SpeculationView(WORDS, in_colour=True)
    sources = (HEADS_SOURCE, HEADS_SOURCE, NGRAM_SOURCE, EARLIER_SOURCE, MODEL_SOURCE)
    shown = view.push(Emit((1, 1, 1, 1, 1), 5, 5, (), sources=sources), ALL)
    assert shown == ("\x1b[35moneone\x1b[0m\x1b[36mone\x1b[0m\x1b[33mone\x1b[0m\x1b[32mone\x1b[0m")
    assert view.push(Emit((1,), 1, 1, (), sources=(3,)), ALL) == (
        "\x1b[2m│\x1b[0m\x1b[32mone\x1b[0m"
    )
    plain = SpeculationView(WORDS, in_colour=False)
    assert plain.push(Emit((1, 1), 2, 2, (), sources=(7, 1)), ALL) == "oneone"


def test_a_character_of_two_sources_appears_in_the_colour_of_the_one_that_completes_it(
    bytewise: Tokenization,
) -> None:
    first, second = bytewise.encode("é")
    view = SpeculationView(bytewise.stream(()), in_colour=True)
    both = Emit((first, second), 2, 2, (), sources=(NGRAM_SOURCE, HEADS_SOURCE))
    assert view.push(both, ALL) == "\x1b[35mé\x1b[0m"
    assert view.push(Emit((first,), 1, 1, (), sources=(NGRAM_SOURCE,)), ALL) == ""
    assert view.finish(ALL) == "\x1b[2m│\x1b[0m\x1b[36m\ufffd\x1b[0m"


def test_parts_add_up_to_the_whole(bytewise: Tokenization) -> None:
    text = "aé日b"
    ids = bytewise.encode(text)
    assembly = Assembly("p", (1,), 7, bytewise.stream((1,)))
    parts = [assembly.push(Emit((token,), 0, 0, ())) for token in ids]
    texts = [part.outputs[0].text for part in parts]
    assert texts == ["a", "", "é", "", "", "日", "b"]
    assert all(part.prompt_token_ids == [1] and part.seed == 7 for part in parts)
    assert not any(part.finished for part in parts)
