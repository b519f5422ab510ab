"""Which tokens end a text: what is said at load where the target's files leave it open."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from coordinator.api.config import PairConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.prompts import Tokenization
from coordinator.api.text_ends import NO_END, open_ends
from coordinator.api.vllm import TargetTokenizer

END = "<|im_end|>"


class Loaded(Pair):
    """A pair whose nodes are loaded, as far as the ends of texts go."""

    def __init__(self, folder: Path, eos_ids: tuple[int, ...], size: int) -> None:
        self.config = PairConfig(target=str(folder), drafter=str(folder))
        self.tokenization = Tokenization.of_model(str(folder), None)
        hello: Any = SimpleNamespace(fingerprint=SimpleNamespace(eos_ids=eos_ids), logits_size=size)
        registry: Any = SimpleNamespace(hellos=lambda _: [hello])
        self.service: Any = SimpleNamespace(registry=registry)


def loaded(folder: Path, *eos_ids: int, size: int = 10, **config: Any) -> Loaded:
    """Put a tokenizer of which token 3 is END into a folder, and return a pair of it."""
    words = {word: number for number, word in enumerate(["a", "b", "c", END])}
    Tokenizer(models.BPE(words, [])).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Loaded(folder, eos_ids, size)


def test_an_end_that_the_files_do_not_name_is_named_once_with_what_to_do(tmp_path: Path) -> None:
    (line,) = loaded(tmp_path, 2, eos_token=END).open_ends()
    assert line == (
        f"the tokenizer's eos_token {END} (id 3) ends no text by the target's files; if it should, "
        "add --stop-token-ids 3"
    )
    assert loaded(tmp_path, eos_token=END).open_ends() == [line]
    assert loaded(tmp_path, 2, 3, eos_token=END).open_ends() == []


def test_where_no_token_ends_a_text_that_is_said(tmp_path: Path) -> None:
    assert loaded(tmp_path).open_ends() == [NO_END]
    assert "--stop-token-ids" in NO_END
    # The tokenizer gets a token 4, which the target cannot write.
    assert loaded(tmp_path, eos_token="<unknown>", size=4).open_ends() == [NO_END]
    assert loaded(tmp_path, eos_token=END, size=3).open_ends() == [NO_END]
    assert loaded(tmp_path, 2).open_ends() == []


def test_what_the_user_settles_is_not_said(tmp_path: Path) -> None:
    pair = loaded(tmp_path, eos_token=END)
    assert pair.open_ends(SamplingParams(stop_token_ids=[3])) == []
    assert pair.open_ends(SamplingParams(ignore_eos=True)) == []
    assert len(pair.open_ends(SamplingParams(stop_token_ids=[1]))) == 1
    without = loaded(tmp_path)
    assert without.open_ends(SamplingParams(stop_token_ids=[1])) == []
    assert without.open_ends(SamplingParams(stop="\n")) == []


def test_a_folder_without_a_tokenizer_or_with_a_torn_file_is_no_obstacle(tmp_path: Path) -> None:
    pair = loaded(tmp_path, 2, eos_token=END)
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert pair.open_ends() == []
    pair.tokenization = None
    assert pair.open_ends() == []
    assert open_ends((), None, None) == [NO_END]


def test_the_tokenizer_names_its_own_end_as_transformers_does(tmp_path: Path) -> None:
    pair = loaded(tmp_path, 2, eos_token=END)
    assert TargetTokenizer(pair).eos_token_id == 3
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 3
    assert TargetTokenizer(loaded(tmp_path, 1, 2)).eos_token_id == 1
    assert TargetTokenizer(loaded(tmp_path)).eos_token_id is None


@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
def test_the_token_is_found_as_for_chat_templates(tmp_path: Path, name: str) -> None:
    pair = loaded(tmp_path, 2)
    (tmp_path / name).write_text(json.dumps({"eos_token": {"content": END}}))
    assert len(pair.open_ends()) == 1
