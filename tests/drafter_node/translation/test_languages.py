"""What a drafter makes of the target's tokenizer that came with the Welcome, and what it says."""

import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from drafter_node.worker import languages_of, words_on
from engine.words import Shared
from proto.errors import ModelError
from proto.installation import MODELS
from proto.messages import Role, Welcome
from proto.node_config import NodeConfig

ENGINE: Any = SimpleNamespace(loaded=SimpleNamespace(eos_token_ids=(0,)))
TARGET = zlib.compress((MODELS / "target" / "tokenizer.json").read_bytes())


def config(model: Path) -> NodeConfig:
    return NodeConfig(Role.DRAFTER, "tcp://x", "drafter-1", "secret", str(model))


def whole_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_with_the_targets_tokenizer_there_is_nothing_to_translate() -> None:
    assert languages_of(config(MODELS / "drafter"), ENGINE, Welcome(100, 0)) is None


def test_both_vocabularies_are_read() -> None:
    found = languages_of(config(MODELS / "drafter"), ENGINE, Welcome(100, 0, tokenizer=TARGET))
    assert found is not None
    assert (len(found.own), len(found.target), found.eos) == (4096, 4096, b"<|endoftext|>")


@pytest.mark.parametrize("data", [b"garbage", zlib.compress(whole_words().to_str().encode())])
def test_a_tokenizer_that_cannot_be_translated_ends_the_node_in_one_line(data: bytes) -> None:
    with pytest.raises(ModelError, match="choose a drafter with the target's tokenizer"):
        languages_of(config(MODELS / "drafter"), ENGINE, Welcome(100, 0, tokenizer=data))


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        languages_of(config(tmp_path), ENGINE, Welcome(100, 0, tokenizer=TARGET))


def test_people_are_told_what_is_shared_and_warned_below_a_half() -> None:
    line = "its tokenizer has 12 % of the target's tokens (50 % in a sample text)"
    assert words_on(Shared(0.12, 0.5)) == line
    assert words_on(Shared(0.8, 0.49)).endswith("(49 % in a sample text): few drafts may be right")
