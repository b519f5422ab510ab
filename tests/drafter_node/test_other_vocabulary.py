"""The drafters of another vocabulary that tests are given: what they read and predict."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from torch import Tensor

from proto.installation import ROOT
from tests.other_vocabulary import DRAFTER, permuted, smaller, unigram

SOURCE = (ROOT / "proto" / "codec.py").read_text(encoding="utf-8")
HARD = 'if x:\r\n\n\n\tgröße = "é ①"  \t# 🎉👩‍🚀 naïve <0x41> </p>\n    '


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a model."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.inference_mode()
def logits_of(folder: Path, text: str) -> Tensor:
    """What a model predicts after each token of a text, [T, V]."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([tokenizer_of(folder).encode(text).ids])).logits[0]
    assert logits.shape[1] == model.config.vocab_size == tokenizer_of(folder).get_vocab_size()
    return logits


@pytest.mark.parametrize("make", [permuted, smaller, unigram])
def test_each_gives_texts_back_and_predicts_something(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = make(tmp_path)
    tokenizer, config = tokenizer_of(folder), hf.AutoConfig.from_pretrained(folder)
    loaded = hf.AutoTokenizer.from_pretrained(folder)
    for text in (SOURCE, HARD, f"  {HARD}", f"\n{HARD}"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        assert loaded.encode(text) == tokenizer.encode(text).ids
    settings = hf.GenerationConfig.from_pretrained(folder)
    assert loaded.eos_token_id == config.eos_token_id == settings.eos_token_id
    assert bool(logits_of(folder, HARD).isfinite().all())


def test_other_numbers_for_its_tokens_change_nothing_that_a_model_predicts(tmp_path: Path) -> None:
    here, there = tokenizer_of(permuted(tmp_path)), tokenizer_of(DRAFTER)
    vocabulary = there.get_vocab(with_added_tokens=True)
    numbers = torch.tensor([here.token_to_id(name) for name in sorted(vocabulary)])
    before = torch.tensor([vocabulary[name] for name in sorted(vocabulary)])
    assert int((numbers != before).sum()) > 4000
    assert here.encode(HARD).tokens == there.encode(HARD).tokens
    predicted, expected = logits_of(tmp_path, SOURCE[:500]), logits_of(DRAFTER, SOURCE[:500])
    torch.testing.assert_close(predicted[:, numbers], expected[:, before], rtol=0, atol=1e-4)


def test_with_fewer_tokens_a_text_is_longer(tmp_path: Path) -> None:
    here, there = tokenizer_of(smaller(tmp_path, 1000)), tokenizer_of(DRAFTER)
    assert here.get_vocab_size() == 1000
    assert here.get_vocab().items() <= there.get_vocab().items()
    assert len(here.encode(SOURCE).ids) > 1.1 * len(there.encode(SOURCE).ids)


def test_a_unigram_has_the_strings_and_rows_of_the_drafters_tokens(tmp_path: Path) -> None:
    here, there = tokenizer_of(unigram(tmp_path)), tokenizer_of(DRAFTER)
    assert here.encode("def ß(self):").tokens[:4] == ["▁def", "▁", "<0xC3>", "<0x9F>"]
    pairs = [("▁return", "Ġreturn"), ("self", "self"), ("<0xC3>", "Ã"), ("</s>", "<|endoftext|>")]
    rows = [
        hf.AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
        for folder in (tmp_path, DRAFTER)
    ]
    for piece, token in pairs:
        assert torch.equal(rows[0][here.token_to_id(piece)], rows[1][there.token_to_id(token)])
