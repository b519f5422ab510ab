"""Names, bytes and places of tokens come from their bytes, whatever tokens stand beside them."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors

from coordinator.api.models.tokenizers import OUR_TARGET
from coordinator.api.outputs import Assembly, CompletionOutput, Logprob
from coordinator.api.prompts import Tokenization
from coordinator.api.token_names import TokenNames
from coordinator.http.answers import chat_logprobs, legacy_logprobs
from coordinator.text.detokenization import Ending
from coordinator.text.session_events import Emit
from proto.sampling import Logprobs
from tests.coordinator.text.test_detokenization import KINDS, UNKNOWN, byte_level
from tests.coordinator.text.test_stops import METRICS
from tests.tiny_tokenizer import sentencepiece_tokenizer


def bytewise() -> Tokenizer:
    """It cuts texts as GPT-2 does, into bytes; its post-processor leaves spaces out of ranges."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


MADE = {kind: Tokenization(make()) for kind, make in KINDS.items()}
BYTEWISE = ("byte-level", "sentencepiece", "gemma", "unigram")
# These encode texts, too.
READERS = {
    "byte-level": lambda: bytewise(),
    "sentencepiece": lambda: sentencepiece_tokenizer(),
    "target": lambda: Tokenizer.from_file(str(OUR_TARGET / "tokenizer.json")),
}
READING = {kind: Tokenization(make()) for kind, make in READERS.items()}
TEXTS = st.text(st.sampled_from("the cat.é日🚲\n \ufffd"), max_size=12)


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Any tokens, with those of characters in bytes among them."""
    size = MADE[kind].raw.get_vocab_size()
    one = st.integers(0, size - 1).map(lambda token: [token]) | st.just([UNKNOWN])
    cut = st.tuples(st.sampled_from("é日🚲"), st.integers(1, 4)).map(
        lambda drawn: in_bytes(kind, drawn[0].encode()[: drawn[1]])
    )
    return st.lists(one | cut, max_size=24).map(
        lambda parts: [token for part in parts for token in part]
    )


@cache
def by_bytes_of(kind: str) -> Mapping[bytes | None, int]:
    """The last token that says these bytes."""
    return {MADE[kind].bytes_of(id_): id_ for id_ in range(MADE[kind].raw.get_vocab_size())}


@cache
def known_of(kind: str) -> Sequence[tuple[int, bytes | None]]:
    """Every token, and the bytes that it says."""
    return [(id_, MADE[kind].bytes_of(id_)) for id_ in range(MADE[kind].raw.get_vocab_size())]


def in_bytes(kind: str, said: bytes) -> list[int]:
    """Tokens of one byte each; [] where there are none."""
    by_bytes = by_bytes_of(kind)
    return [by_bytes[bytes((byte,))] for byte in said if bytes((byte,)) in by_bytes]


def split(kind: str, said: bytes, data: st.DataObject) -> list[int]:
    """Tokens that say this, one of all the ways."""
    ids = []
    while said:
        fit = [(id_, word) for id_, word in known_of(kind) if word and said.startswith(word)]
        if not fit:
            return split(kind, said[1:], data)
        id_, word = data.draw(st.sampled_from(fit))
        ids.append(id_)
        said = said[len(word) :]
    return ids


def placed(kind: str, ids: Sequence[int], prompt: Sequence[int] = ()) -> tuple[str, list[int]]:
    stream = MADE[kind].stream(prompt)
    pieces = stream.placed(ids)
    assert stream.end == len("".join(piece.text for piece in pieces) + stream.finish())
    stream = MADE[kind].stream(prompt)
    one_by_one = [stream.placed([token])[0] for token in ids]
    assert one_by_one == pieces
    return "".join(piece.text for piece in pieces) + stream.finish(), [one.begin for one in pieces]


def parts(text: str, begins: Sequence[int]) -> list[str]:
    return [text[begin:end] for begin, end in pairwise([*begins, len(text)])]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_the_texts_between_the_places_of_any_tokens_are_the_text(
    kind: str, data: st.DataObject
) -> None:
    prompt, ids = data.draw(ids_of(kind)), data.draw(ids_of(kind))
    text, begins = placed(kind, ids, prompt)
    assert begins == sorted(begins)
    if begins:
        assert begins[0] == 0
        assert begins[-1] <= len(text)
        assert "".join(parts(text, begins)) == text


@pytest.mark.parametrize("kind", BYTEWISE)
@given(data=st.data())
def test_a_token_of_a_valid_text_begins_where_its_first_byte_lies(
    kind: str, data: st.DataObject
) -> None:
    """Compared with counting the characters before each byte."""
    ids = split(kind, data.draw(TEXTS).encode(), data)
    said = [MADE[kind].bytes_of(token) or b"" for token in ids]
    whole = b"".join(said).decode()
    shown, begins = placed(kind, ids)
    num_stripped = len(whole) - len(shown)
    character_of = [index for index, sign in enumerate(whole) for _ in sign.encode()]
    starts = accumulate(map(len, said), initial=0)
    expected = [
        max(0, character_of[start] - num_stripped) for start, _ in zip(starts, said, strict=False)
    ]
    assert whole.endswith(shown)
    assert begins == expected


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@given(data=st.data())
def test_a_hidden_token_has_no_length_but_within_a_broken_character(
    kind: str, data: st.DataObject
) -> None:
    ids = data.draw(ids_of(kind))
    text, begins = placed(kind, ids)
    special = [token in MADE[kind]._special_tokens or token == UNKNOWN for token in ids]
    for part, is_hidden in zip(parts(text, begins), special, strict=True):
        assert not is_hidden or part.strip("\ufffd") == ""


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_hidden_token_within_a_character_changes_nothing(kind: str) -> None:
    (hidden, *_) = MADE[kind]._special_tokens
    bicycle = in_bytes(kind, "🚲".encode())
    a, b = in_bytes(kind, b"\n\n")
    ids = [a, hidden, *bicycle[:2], hidden, *bicycle[2:], hidden, b]
    assert placed(kind, ids) == ("\n🚲\n", [0, 1, 1, 1, 1, 1, 1, 2, 2])


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_stop_token_behind_a_broken_character_stands_behind_it(kind: str) -> None:
    ids = in_bytes(kind, "\n🚲".encode())[:3]
    (stop, *_) = MADE[kind]._special_tokens
    for emits in ([(*ids, stop)], [(token,) for token in (*ids, stop)]):
        assembly = Assembly(None, (), 0, MADE[kind].stream(()), ending=Ending(stop_ids=(stop,)))
        for tokens in emits:
            logprobs = Logprobs(tokens, (-1.0,) * len(tokens), (1,) * len(tokens))
            assembly.push(Emit(tokens, 0, 0, (), logprobs=logprobs))
        assembly.finish("stop", METRICS)
        (made,) = assembly.whole().outputs
        assert made.text_offsets is not None
        assert made.text_offsets[:3] == [0, 1, 1]
        assert made.text_offsets[3] == len(made.text)


@pytest.mark.parametrize("kind", BYTEWISE)
def test_names_and_bytes_are_the_tokens_own(kind: str) -> None:
    names = TokenNames(MADE[kind])
    (first, *_, last) = in_bytes(kind, "🚲".encode())
    assert (names.name(first), names.said(first)) == (r"bytes:\xf0", b"\xf0")
    assert (names.name(last), names.said(last)) == (r"bytes:\xb2", b"\xb2")
    spaced = MADE[kind].raw.token_to_id("Ġthe" if kind == "byte-level" else "▁the")
    assert (names.name(spaced), names.said(spaced)) == (" the", b" the")
    for special, name in MADE[kind]._special_tokens.items():
        assert (names.name(special), names.said(special)) == (name, name.encode())
    assert (names.name(UNKNOWN), names.said(UNKNOWN)) == ("", b"")


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(BYTEWISE)))
def test_tokens_of_other_kinds_are_named_as_they_read_behind_another(kind: str) -> None:
    names, decoder = TokenNames(MADE[kind]), MADE[kind].stream(())
    for token in range(MADE[kind].raw.get_vocab_size()):
        if (said := decoder.single(token)) and token not in MADE[kind]._special_tokens:
            assert names.name(token).strip() == said.strip()
            assert names.said(token) == names.name(token).encode()


def test_an_added_token_is_its_text_in_bytes() -> None:
    for make in (byte_level, sentencepiece_tokenizer):
        tokenizer = make()
        tokenizer.add_tokens([AddedToken("<é 🚲>", special=False)])
        names = TokenNames(Tokenization(tokenizer))
        assert names.name(tokenizer.token_to_id("<é 🚲>")) == "<é 🚲>"


@pytest.mark.parametrize("kind", READING)
@given(text=TEXTS)
def test_bytes_of_tokens_joined_are_the_bytes_of_the_text(kind: str, text: str) -> None:
    names = TokenNames(READING[kind])
    ids = READING[kind].encode(text, special_tokens=False)
    assert b"".join(map(names.said, ids)).decode().endswith(text)


# -- prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_an_echo_of_any_ids_is_cut_into_its_tokens(kind: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(kind))
    text, begins = TokenNames(MADE[kind]).echo(None, ids)
    assert begins == sorted(begins)
    assert len(begins) == len(ids)
    assert "".join(parts(text, begins)) == text or not ids


@pytest.mark.parametrize("kind", READING)
@given(text=TEXTS)
def test_an_echo_of_ids_is_their_text_decoded_together(kind: str, text: str) -> None:
    ids = READING[kind].encode(text)
    shown, _ = TokenNames(READING[kind]).echo(None, ids)
    assert shown == READING[kind].raw.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", READING)
@given(text=TEXTS)
def test_an_echo_of_a_text_is_the_text_with_its_tokens_in_their_places(
    kind: str, text: str
) -> None:
    names = TokenNames(READING[kind])
    ids = READING[kind].encode(text)
    shown, begins = names.echo(text, ids)
    assert shown == text
    assert begins == sorted(begins)
    assert "".join(parts(text, begins)) == text or not ids
    if kind != "sentencepiece":  # which puts a space before a text
        said = {token: names.name(token) for token in ids}
        for token, part in zip(ids, parts(text, begins), strict=True):
            assert said[token] == part or said[token].startswith("bytes:")


def test_tokens_of_a_text_that_the_tokenizer_changes_have_their_places_in_what_was_given() -> None:
    tokenizer = bytewise()
    tokenizer.normalizer = normalizers.Lowercase()
    text = "A É🚲B"
    ids = Tokenization(tokenizer).encode(text)
    shown, begins = TokenNames(Tokenization(tokenizer)).echo(text, ids)
    assert shown == text
    assert begins == [0, 1, 2, 2, 3, 3, 3, 3, 4]


def test_tokens_that_a_tokenizer_adds_to_a_text_have_no_length() -> None:
    tokenization = Tokenization(sentencepiece_tokenizer())
    ids = tokenization.encode("the</s> cat")
    text, begins = TokenNames(tokenization).echo("the</s> cat", ids)
    names = [tokenization.raw.id_to_token(token) for token in ids]
    assert names[:3] == ["<s>", "▁the", "</s>"]
    assert text == "the</s> cat"
    assert begins[:4] == [0, 0, 3, 7]
    assert TokenNames(tokenization).echo(None, ids)[0].startswith("<s> the</s>")


def test_without_a_tokenizer_names_are_ids() -> None:
    names = TokenNames(None)
    assert (names.name(7), names.said(7)) == ("7", b"7")
    assert names.echo(None, [5, 16]) == ("5,16,", [0, 1])


# -- answers ---------------------------------------------------------------------------------------


def test_of_equal_names_the_number_of_the_texts_token_stands() -> None:
    kind = "gemma"
    tokenizer = MADE[kind].raw
    newline, byte = tokenizer.token_to_id("\n"), tokenizer.token_to_id("<0x0A>")
    the = tokenizer.token_to_id("the")
    names = TokenNames(MADE[kind])
    assert names.name(newline) == names.name(byte) == "\n"
    row = {
        byte: Logprob(-3.0, 3, "\n"),
        newline: Logprob(-1.0, 1, "\n"),
        the: Logprob(-2.0, 2, "the"),
    }
    for num_top, top in ((0, {"\n": -3.0}), (2, {"\n": -3.0, "the": -2.0})):
        told = legacy_logprobs([row], [byte], [0], names, num_top)
        assert told["top_logprobs"] == [top]
        assert told["token_logprobs"] == [-3.0]
    told = legacy_logprobs([row], [the], [0], names, 3)
    assert told["top_logprobs"] == [{"\n": -1.0, "the": -2.0}]


def test_chat_tells_the_bytes_of_each_token() -> None:
    kind = "sentencepiece"
    ids = [*in_bytes(kind, "🚲".encode()), MADE[kind].raw.token_to_id("▁the")]
    rows = [{token: Logprob(-1.0, 1, "\ufffd")} for token in ids]
    made = CompletionOutput(0, "🚲 the", ids, logprobs=rows)
    told = chat_logprobs(made, TokenNames(MADE[kind]), 1)["content"]
    assert bytes(byte for one in told for byte in one["bytes"]) == "🚲 the".encode()
    assert [one["token"] for one in told][-1] == " the"
    assert all(one["top_logprobs"][0]["bytes"] == one["bytes"] for one in told)
