"""Tokenizers that differ: which are translated, and which are refused before anything is loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coordinator.api.models import folders
from coordinator.api.models.tokenizers import check_fit, differ
from proto.errors import IncompatibleError
from proto.installation import MODELS
from tests.tiny_tokenizer import sentencepiece_tokenizer

TARGET = MODELS / "target"
FIX = "; choose a drafter with the target's tokenizer: --drafter NAME, or --drafter ngram"


def whole_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def chinese() -> Tokenizer:
    """A byte-level tokenizer with only two tokens, which no English text has."""
    names = [pre_tokenizers.ByteLevel().pre_tokenize_str(one)[0][0] for one in "中文"]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def folder_of(tokenizer: Tokenizer, folder: Path) -> str:
    folder.mkdir()
    size = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_a_tokenizer_that_can_be_translated_fits_unless_the_same_is_required(
    tmp_path: Path,
) -> None:
    name = folder_of(sentencepiece_tokenizer(), tmp_path / "other")
    target, drafter = folders.find(str(TARGET), None), folders.find(name, None)
    check_fit(target, drafter, may_differ=True)
    with pytest.raises(IncompatibleError, match="vocabulary has"):
        check_fit(target, drafter, may_differ=False)
    assert differ(str(TARGET), name)
    assert not differ(str(TARGET), str(MODELS / "drafter"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (whole_words, "drafter and target have different tokenizers, of which one is of a rare"),
        (chinese, "the drafter's tokenizer shares no token with the target's in a sample text"),
    ],
)
def test_what_cannot_be_translated_is_refused_in_one_line(
    make: Callable[[], Tokenizer], reason: str, tmp_path: Path
) -> None:
    name = folder_of(make(), tmp_path / "other")
    target, drafter = folders.find(str(TARGET), None), folders.find(name, None)
    with pytest.raises(IncompatibleError) as refusal:
        check_fit(target, drafter, may_differ=True)
    assert str(refusal.value).startswith(reason)
    assert FIX in str(refusal.value)


def test_the_drafter_that_ships_is_for_its_own_target(tmp_path: Path) -> None:
    name = folder_of(sentencepiece_tokenizer(), tmp_path / "other")
    target = folders.find(name, None)
    drafter = folders.find(str(MODELS / "drafter"), None)
    with pytest.raises(IncompatibleError, match="is for its own target"):
        check_fit(target, drafter, may_differ=True)
