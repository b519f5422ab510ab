"""The text of an answer is what decoding prompt and answer together says beyond the prompt.

transformers decodes both together for comparison, from the same tokenizer.
"""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from coordinator.api.outputs import Assembly
from coordinator.api.prompts import Tokenization
from coordinator.cli.speculation_view import SpeculationView
from coordinator.text.detokenization import REPLACEMENT, WINDOW, Ending
from coordinator.text.session_events import Emit
from tests.coordinator.text.test_stops import METRICS
from tests.tiny_tokenizer import SPECIAL, sentencepiece_tokenizer

WORDS = ["the", "is", "of", "a", "cat", "text", "end"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = "é日🚲\n"
UNKNOWN = 5000  # an id that stands for nothing, as in padded vocabularies


def made(model: models.Model, decoder: decoders.Decoder | None) -> Tokenizer:
    """A tokenizer with one special token."""
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


def numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def byte_level() -> Tokenizer:
    """Every byte, and some pieces of several characters or of parts of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    more = [level.pre_tokenize_str(text)[0][0] for text in (" the", " é", "日本", "🚲", "\ufffd")]
    pieces = [*more, more[2][:4], more[2][1:], more[3][1:3]]
    return made(models.BPE(numbered([*alphabet, *pieces]), []), decoders.ByteLevel())


def metaspace(scheme: str) -> Callable[[], Tokenizer]:
    def tokenizer() -> Tokenizer:
        names = [*WORDS, *(f"▁{word}" for word in WORDS), "▁", "▁▁", ".", "é", "日"]
        model = models.BPE(numbered(names), [])
        return made(model, decoders.Metaspace(prepend_scheme=scheme))

    return tokenizer


def gemma() -> Tokenizer:
    """No space is put before a text, and none is taken away."""
    names = [*WORDS, *(f"▁{word}" for word in WORDS), "▁", "▁▁", "\n", *BYTES]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return made(models.BPE(numbered(names), []), decoders.Sequence(steps))


def unigram() -> Tokenizer:
    names = ["<unk>", *BYTES, *WORDS, *(f"▁{word}" for word in WORDS), "▁", "▁▁"]
    model = models.Unigram([(name, -1.0) for name in names], unk_id=0, byte_fallback=True)
    steps = [decoders.ByteFallback(), decoders.Metaspace()]
    return made(model, decoders.Sequence(steps))


def word_piece() -> Tokenizer:
    names = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS), ".", ",", "'", "n't", "##s"]
    return made(models.WordPiece(numbered(names), unk_token="[UNK]"), decoders.WordPiece())


def suffixes() -> Tokenizer:
    """A space behind every word but the last."""
    names = [*WORDS, *(f"{word}</w>" for word in WORDS), ".</w>"]
    return made(models.BPE(numbered(names), []), decoders.BPEDecoder(suffix="</w>"))


def without_decoder() -> Tokenizer:
    return made(models.WordLevel(numbered(["[UNK]", *WORDS]), unk_token="[UNK]"), None)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece_tokenizer,
    "metaspace-first": metaspace("first"),
    "metaspace-always": metaspace("always"),
    "metaspace-never": metaspace("never"),
    "gemma": gemma,
    "unigram": unigram,
    "wordpiece": word_piece,
    "suffixes": suffixes,
    "no-decoder": without_decoder,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


class Judge:
    """Decodes as transformers does, and draws tokens to be decoded."""

    def __init__(self, tokenizer: Tokenizer, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        names = dict(sorted(tokenizer.get_vocab().items(), key=itemgetter(1)))
        self._plain = [number for name, number in names.items() if name not in BYTES]
        self._bytes = {name: number for name, number in names.items() if name in BYTES}

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._fast.decode(list(tokens), skip_special_tokens=True))

    def whole_characters(self, tokens: Sequence[int]) -> str:
        """The text up to the last place where no character is incomplete."""
        ends = range(len(tokens), -1, -1)
        texts = (self.decode(tokens[:end]) for end in ends)
        return next(text for text in texts if not text.endswith(REPLACEMENT))

    def grows(self, tokens: Sequence[int]) -> bool:
        """Whether more tokens never change what stood there, incomplete characters excepted."""
        beginnings = accumulate(([token] for token in tokens), initial=list[int]())
        texts = [self.decode(beginning).rstrip(REPLACEMENT) for beginning in beginnings]
        whole = self.decode(tokens)
        return all(whole.startswith(text) for text in texts)

    def answer(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        """What decoding both together says beyond the prompt."""
        whole, begun = self.decode([*prompt, *answer]), self.decode(prompt)
        while not whole.startswith(begun):  # the answer completes a character of the prompt
            begun = begun[:-1]
        return whole[max(len(begun), len(self.whole_characters(prompt))) :]

    def tokens(self, size: int) -> list[int]:
        """At least so many, among them characters in bytes, some of them cut."""
        drawn: list[int] = []
        while len(drawn) < size:
            if self._bytes and self._rng.random() < 0.4:
                encoded = self._rng.choice(CHARACTERS).encode()
                end = self._rng.choice((1, 2, 4, 4, 4, 4))
                drawn += [self._bytes[f"<0x{byte:02X}>"] for byte in encoded[:end]]
            else:
                drawn.append(self._rng.choice([*self._plain, UNKNOWN]))
        return drawn


def drawn(judge: Judge, count: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers of every length that never change what has been said."""
    sizes = random.Random(1)
    found = []
    while len(found) < count:
        tokens = judge.tokens(sizes.randint(0, 2 * longest))
        cut = sizes.randint(0, min(len(tokens), longest))
        if judge.grows(tokens):
            found.append((tokens[:cut], tokens[cut:]))
    return found


def test_pieces_and_the_end_are_what_the_answer_adds_to_its_prompt(tokenizer: Tokenizer) -> None:
    judge = Judge(tokenizer)
    tokenization = Tokenization(tokenizer)
    for prompt, answer in drawn(judge, 250, 12) + drawn(judge, 40, 4 * WINDOW):
        stream = tokenization.stream(prompt)
        text = ""
        for number, token in enumerate(answer, 1):
            text += "".join(stream.pieces([token]))
            so_far = answer[:number]
            if not judge.decode([*prompt, *so_far]).endswith(REPLACEMENT):
                assert text == judge.answer(prompt, so_far), (prompt, so_far)
        text += stream.finish()
        assert text == judge.answer(prompt, answer), (prompt, answer)
        assert stream.finish() == ""


def test_the_parts_of_an_assembly_and_its_speculation_show_the_same_text(
    tokenizer: Tokenizer,
) -> None:
    judge = Judge(tokenizer, seed=1)
    tokenization = Tokenization(tokenizer)
    for prompt, answer in drawn(judge, 60, 12):
        assembly = Assembly(None, prompt, 0, tokenization.stream(prompt))
        view = SpeculationView(tokenization.stream(prompt), in_colour=False)
        shown = ""
        for begin in range(0, len(answer), 3):
            tokens = tuple(answer[begin : begin + 3])
            emit = Emit(tokens, len(tokens), 5, ())
            shown += view.push(emit, assembly.push(emit).outputs[0].text)
        shown += view.finish(assembly.finish("length", METRICS).outputs[0].text)
        assert shown == assembly.whole().outputs[0].text == judge.answer(prompt, answer)


def test_special_tokens_are_text_where_they_are_not_skipped() -> None:
    tokenizer = sentencepiece_tokenizer()
    tokenization = Tokenization(tokenizer)
    prompt = tokenization.encode("the text is")
    the, cat = tokenization.encode("the cat", special_tokens=False)
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    answer = (the, end, begin, cat, the, *(cat, end) * 12)
    for skips in (True, False):
        whole, begun = (
            tokenizer.decode(list(ids), skip_special_tokens=skips)
            for ids in (prompt + answer, prompt)
        )
        stream = tokenization.stream(prompt, skip_special_tokens=skips)
        view = SpeculationView(
            tokenization.stream(prompt, skip_special_tokens=skips), in_colour=False
        )
        pieces = stream.pieces(answer)
        assert "".join(pieces) + stream.finish() == whole.removeprefix(begun)
        assert stream.single(end) == "</s>", "by name in either case"
        assert ("</s>" in "".join(pieces)) is not skips
        # A rejected draft is shown by its name once.
        assert view.push(Emit((the,), 0, 1, (end,)), "").count("</s>") == 1


def test_a_stop_string_may_begin_with_the_space_behind_the_prompt() -> None:
    tokenization = Tokenization(sentencepiece_tokenizer())
    prompt = tokenization.encode("the text is")
    answer = tokenization.encode("the end", special_tokens=False)
    for stop, text in ((" the", ""), (" end", " the"), ("the", " ")):
        assembly = Assembly(None, prompt, 0, tokenization.stream(prompt), ending=Ending((stop,)))
        assembly.push(Emit(answer, 0, 0, ()))
        last = assembly.finish("length", METRICS).outputs[0]
        assert (assembly.whole().outputs[0].text, last.stop_reason) == (text, stop)


def test_a_stop_string_is_found_in_what_a_cut_character_held_back() -> None:
    tokenizer = byte_level()
    vocabulary = tokenizer.get_vocab().values()
    (token,) = [token for token in vocabulary if tokenizer.decode([token]) == "日\ufffd"]
    for ending, text in ((Ending(("日",)), ""), (Ending(("日",), min_tokens=1), "日\ufffd")):
        assembly = Assembly(None, (1,), 0, Tokenization(tokenizer).stream((1,)), ending=ending)
        assembly.push(Emit((token,), 0, 0, ()))
        last = assembly.finish("length", METRICS).outputs[0]
        found = None if text else "日"
        assert (last.text, last.stop_reason) == (text, found)
        assert last.finish_reason == ("stop" if found else "length")


def test_rejected_drafts_show_their_first_space_and_keep_nothing() -> None:
    tokenization = Tokenization(sentencepiece_tokenizer())
    the, cat = tokenization.encode("the cat", special_tokens=False)
    view = SpeculationView(tokenization.stream((1, the)), in_colour=False)
    assert view.push(Emit((cat,), 0, 1, (the,)), "." * 9) == "[- the-]{+ cat"
    assert view.push(Emit((the, cat), 1, 2, (the,)), "." * 9) == "+} the[- the-]{+ cat"


def test_a_prompt_of_special_tokens_is_no_text_and_the_answer_begins_one() -> None:
    tokenization = Tokenization(sentencepiece_tokenizer())
    the, cat = tokenization.encode("the cat", special_tokens=False)
    for prompt in ((), (1,), (1,) * 99):
        assert "".join(tokenization.stream(prompt).pieces((the, cat))) == "the cat"
    assert "".join(tokenization.stream((the, *(1,) * 99)).pieces((the, cat))) == " the cat"


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "gemma"])
def test_a_character_that_the_answer_completes_is_the_answers(kind: str) -> None:
    tokenization = Tokenization(KINDS[kind]())
    vocabulary = KINDS[kind]().get_vocab()
    names = BYTES if BYTES[0] in vocabulary else bytes_to_unicode()
    bicycle = [vocabulary[names[byte]] for byte in "a\n🚲".encode()]
    for cut in (3, 4, 5):
        stream = tokenization.stream(bicycle[:cut])
        pieces = stream.pieces(bicycle[cut:])
        assert [*pieces, stream.finish()] == [*[""] * (5 - cut), "🚲", ""]


def test_a_bad_byte_behind_good_ones_of_its_run_takes_nothing_back() -> None:
    tokenization = Tokenization(sentencepiece_tokenizer())
    the, *_ = tokenization.encode("the", special_tokens=False)
    newline, first = (3 + byte for byte in b"\n\xf0")
    stream = tokenization.stream((1, the))
    assert stream.pieces((newline, first, the)) == ["\n", "", f"{REPLACEMENT} the"]
    good = [3 + byte for byte in "é日".encode() * 20]
    stream = tokenization.stream((the, *good))
    assert "".join(stream.pieces((first, newline, the))) == f"{REPLACEMENT * 2} the"
    assert "".join(stream.pieces((*good, first, the))) == f"{'é日' * 20}{REPLACEMENT} the"
    cut = tokenization.stream((1, the))
    assert [*cut.pieces((newline, first)), cut.finish()] == ["\n", "", REPLACEMENT]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_what_will_never_be_a_character_is_not_held_back(kind: str) -> None:
    tokenizer = KINDS[kind]()
    (bad,) = [
        tokenizer.token_to_id(name) for name in ("<0xFF>", "ÿ") if name in tokenizer.get_vocab()
    ]
    stream = Tokenization(tokenizer).stream((bad,))
    assert stream.pieces([bad] * 100) == [REPLACEMENT] * 100
    assert stream.finish() == ""


def test_tokens_by_themselves_read_as_they_do_behind_another() -> None:
    for kind, name, text in (
        ("sentencepiece", "▁the", " the"),
        ("sentencepiece", "<0x0A>", "\n"),
        ("sentencepiece", "<0xF0>", REPLACEMENT),
        ("sentencepiece", "</s>", "</s>"),
        ("metaspace-first", "▁▁", "  "),
        ("wordpiece", "##s", "s"),
        ("wordpiece", "the", " the"),
        ("byte-level", "Ġthe", " the"),
        ("byte-level", SPECIAL, SPECIAL),
    ):
        tokenizer = KINDS[kind]()
        assert Tokenization(tokenizer).stream(()).single(tokenizer.token_to_id(name)) == text


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded += len(tokens)
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizer: Tokenizer) -> None:
    judge, counting = Judge(tokenizer), Counting(tokenizer)
    prompt, answer = judge.tokens(50_000), judge.tokens(2000)
    stream = Tokenization(counting).stream(prompt)  # type: ignore[arg-type]
    assert counting.num_decoded < 20 * WINDOW
    counting.num_decoded = 0
    stream.pieces(answer)
    assert counting.num_decoded < 3 * WINDOW * len(answer)


def test_the_cost_of_a_character_in_bytes_does_not_grow_with_their_run() -> None:
    counting = Counting(sentencepiece_tokenizer())
    run = [3 + byte for byte in "日é".encode() * 2000]
    for cut in range(5):
        counting.num_decoded = 0
        stream = Tokenization(counting).stream(run[: 5000 + cut])  # type: ignore[arg-type]
        assert counting.num_decoded < 10 * len(run)
        counting.num_decoded = 0
        stream.pieces(run[5000 + cut :])
        assert counting.num_decoded < 3 * WINDOW * (5000 - cut)
