"""Drafters of another vocabulary: texts survive their tokenizers, and all see the same bytes."""

import math
import re
from pathlib import Path

import pytest
import torch
import transformers as hf

from lab.training import head_texts, other_vocabulary, train_heads
from lab.training.corpus import library_texts
from lab.training.other_vocabulary import (
    NOT_LEARNED,
    Document,
    bits_per_byte,
    lesson,
    main,
    new_vocabulary,
    rows_of,
)
from lab.training.train import DRAFTER, descend

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
LIBRARY = library_texts(held_out=True)
SIZE = 600
HARD = 'if x:\r\n\n\n   \ty = "Größe 🎉 ①"  # <0x41> a<s>\n    '
CUT, WHOLE = Document("for name in", is_whole=False), Document("pass\n", is_whole=True)


@pytest.fixture(autouse=True)
def _small(monkeypatch: Patch) -> None:
    """Runs of seconds: little text to learn from, short texts of the target, few at once."""
    for module in (head_texts, other_vocabulary):
        monkeypatch.setattr(module, "library_texts", lambda held_out: LIBRARY[:6])
    monkeypatch.setattr(other_vocabulary, "package_texts", lambda: LIBRARY[6:12])
    monkeypatch.setattr(other_vocabulary, "UNIGRAM_EVERY", 1)
    monkeypatch.setattr(other_vocabulary, "NUM_HELD_OUT", 4)
    monkeypatch.setattr(other_vocabulary, "WRITTEN_AT_ONCE", 4)
    monkeypatch.setattr(train_heads, "WRITTEN_AT_ONCE", 8)
    monkeypatch.setattr(train_heads, "WINDOW", 32)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_each_tokenizer_gives_source_back_to_the_last_space(kind: str) -> None:
    vocabulary = new_vocabulary(kind, SIZE)
    for text in (*LIBRARY, HARD, f" {HARD}", f"\n{HARD}"):
        assert vocabulary.tokenizer.decode(vocabulary.tokens(text)) == text


def test_a_smaller_bpe_is_no_part_of_the_targets() -> None:
    own = new_vocabulary("bpe", SIZE).tokenizer.get_vocab().keys()
    target = new_vocabulary("same", 0).tokenizer.get_vocab().keys()
    assert 0.5 * SIZE < len(own & target) < SIZE


def test_a_unigram_says_in_bytes_what_it_has_no_piece_for() -> None:
    tokenizer = new_vocabulary("unigram", SIZE).tokenizer
    assert tokenizer.get_vocab_size() == SIZE + 256
    assert tokenizer.encode("ß").tokens == ["▁", "<0xC3>", "<0x9F>"]
    assert "<0x41>" not in tokenizer.encode("<0x41>").tokens


def test_spaces_at_the_end_of_a_text_are_read_as_they_are_before_the_next_word() -> None:
    tokenizer = new_vocabulary("unigram", SIZE).tokenizer
    ended, going_on = tokenizer.encode("x\n   ").tokens, tokenizer.encode("x\n    return").tokens
    assert going_on[: len(ended)] == ended == ["▁", "x", "\n▁▁▁"]
    assert tokenizer.encode("x\n\ny").tokens == ["▁", "x", "\n\n", "y"]


def test_the_end_of_a_text_is_learned_only_where_the_target_ended_it() -> None:
    vocabulary = new_vocabulary("same", 0)
    assert lesson(vocabulary, WHOLE).learned.tolist() == [*vocabulary.tokens(WHOLE.text), 0]
    cut = lesson(vocabulary, CUT)
    assert cut.tokens.tolist() == [*vocabulary.tokens(CUT.text), 0]
    assert cut.learned.tolist() == [*vocabulary.tokens(CUT.text), NOT_LEARNED]


def test_rows_share_the_token_between_them_and_lose_none_but_the_last() -> None:
    rows = rows_of([torch.arange(10), torch.arange(10, 44)])
    assert rows[:, 0].tolist() == list(range(0, 40, 5))
    assert rows[:, 1:].flatten().tolist() == list(range(1, 41))


def test_a_model_that_knows_nothing_takes_as_many_bits_as_its_vocabulary_has() -> None:
    vocabulary = new_vocabulary("same", 0)
    model = DRAFTER.new_model().eval()
    torch.nn.init.zeros_(model.get_input_embeddings().weight)
    num_tokens = len(vocabulary.tokens(CUT.text)) + len(vocabulary.tokens(WHOLE.text)) + 1
    expected = 12 * num_tokens / (CUT.num_bytes + WHOLE.num_bytes)  # 4096 tokens
    assert math.isclose(bits_per_byte(model, vocabulary, [CUT, WHOLE]), expected, rel_tol=1e-4)


def test_a_budget_of_steps_counts_those_of_a_run_that_was_stopped(tmp_path: Path) -> None:
    model, seen = torch.nn.Linear(2, 1), []

    def loss_at(step: int, share: float) -> torch.Tensor:
        seen.append((step, share))
        return model(torch.ones(2)).sum()

    assert descend(model, tmp_path / "run.pt", 1e-3, 0.0, loss_at, num_steps=2) == 2
    assert descend(model, tmp_path / "run.pt", 1e-3, 0.0, loss_at, num_steps=4) == 4
    assert seen == [(0, 0.0), (1, 0.5), (2, 0.5), (3, 0.75)]


def run(monkeypatch: Patch, *arguments: object) -> None:
    """Give the command."""
    monkeypatch.setattr("sys.argv", ["other_vocabulary", *map(str, arguments)])
    main()


def test_drafters_of_each_vocabulary_learn_from_the_same_texts_of_the_target(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    common = ("--size", SIZE, "--num-steps", 3, "--texts", 8, "--work", tmp_path / "work")
    said = set()
    for kind, end in (("bpe", 0), ("unigram", 1), ("same", 0)):
        run(monkeypatch, *common, "--tokenizer", kind, "--out", tmp_path / kind)
        said |= set(re.findall(r"3 steps, .* bytes of text seen .*\)", capsys.readouterr().out))
        monkeypatch.setattr(train_heads, "written", None)  # the texts are there from now on
        monkeypatch.setattr(other_vocabulary, "written", None)
        tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / kind)
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float32)
        assert tokenizer.decode(tokenizer.encode(HARD)) == HARD
        assert tokenizer.eos_token_id == model.config.eos_token_id == end
        assert model.generation_config.eos_token_id == end
        assert model.config.vocab_size == len(tokenizer)
        ids = torch.tensor([tokenizer.encode(HARD)])
        assert bool(model(ids).logits.isfinite().all())
        assert {path.name for path in (tmp_path / kind).iterdir()} == {
            *("config.json", "generation_config.json", "model.safetensors"),
            *("tokenizer.json", "tokenizer_config.json"),
        }
    assert len(said) == 1  # as many bytes, whatever the vocabulary is


def test_a_folder_that_holds_a_model_is_left_as_it_is(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(other_vocabulary, "make", None)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--tokenizer", "same", "--num-steps", 3, "--out", tmp_path)
    assert capsys.readouterr().err.endswith(f"{tmp_path} holds a model; name another folder\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--minutes", 0), "nothing would be trained; give more than 0 --minutes or --num-steps"),
        (("--num-steps", 3, "--size", 256), "--size: give a number from 300 to 60000"),
        (("--num-steps", 3, "--texts", 0), "--texts: give at least 1"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_loaded(
    arguments: tuple[object, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
) -> None:
    monkeypatch.setattr(other_vocabulary, "make", None)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--tokenizer", "bpe", "--out", tmp_path, *arguments)
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {words}")
