"""Tokenizers that differ: which are translated, and which are refused before anything is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coordinator.api.models import folders
from coordinator.api.models.preflight import Preflight
from coordinator.api.models.tokenizers import check_fit, differ
from coordinator.api.prompts import BESIDE, Tokenization
from engine.checkpoint import tokenizer_files
from proto.errors import IncompatibleError, ModelError
from proto.installation import MODELS
from proto.messages import Role
from proto.node_config import NodeConfig
from tests.tiny_tokenizer import sentencepiece_tokenizer

TARGET = MODELS / "target"
EMPTY = (2).to_bytes(8, "little") + b"{}"  # a checkpoint of no tensors
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


def test_a_drafter_in_the_targets_process_is_not_translated(tmp_path: Path) -> None:
    name = folder_of(sentencepiece_tokenizer(), tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").write_bytes(EMPTY)
    nodes = [
        NodeConfig(Role.TARGET, "ipc:///tmp/none", "t", "", str(TARGET), home_drafter=home)
        for home in ("", name)
    ]
    Preflight(nodes[:1], may_differ=True)
    with pytest.raises(IncompatibleError, match="vocabulary has"):
        Preflight(nodes[1:], may_differ=True)


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


def with_config(name: str, **stated: object) -> str:
    (Path(name) / "tokenizer_config.json").write_text(json.dumps(stated))
    return name


def assert_fit(target: str, drafter: str) -> None:
    check_fit(*(folders.find(name, None) for name in (target, drafter)), may_differ=False)
    assert not differ(target, drafter)


@pytest.mark.parametrize("own", [{}, {"eos_token": "<|tool|>"}, {"eos_token": "<|other|>"}])
def test_a_pair_whose_tokenizer_json_files_agree_fits(
    own: dict[str, object], tmp_path: Path
) -> None:
    target = folder_of(sentencepiece_tokenizer(), tmp_path / "target")
    drafter = folder_of(sentencepiece_tokenizer(), tmp_path / "drafter")
    with_config(target, eos_token="<|tool|>", pad_token="<|pad|>")
    assert_fit(target, with_config(drafter, **own))


def test_a_pair_fits_that_states_the_same_tokens_in_different_files(tmp_path: Path) -> None:
    target = folder_of(sentencepiece_tokenizer(), tmp_path / "target")
    with_config(target, eos_token="<|tool|>")
    whole = sentencepiece_tokenizer()
    whole.add_special_tokens(["<|tool|>"])
    drafter = folder_of(whole, tmp_path / "drafter")
    assert_fit(target, drafter)
    assert_fit(drafter, target)


def test_tokens_of_other_files_make_no_two_tokenizers_alike(tmp_path: Path) -> None:
    drafter = with_config(
        folder_of(sentencepiece_tokenizer(), tmp_path / "drafter"), eos_token="<|end|>"
    )
    with pytest.raises(IncompatibleError, match="vocabulary has"):
        assert_fit(str(TARGET), drafter)
    assert differ(str(TARGET), drafter)


def test_a_broken_file_beside_a_tokenizer_json_that_is_the_targets_is_refused(
    tmp_path: Path,
) -> None:
    target = folder_of(sentencepiece_tokenizer(), tmp_path / "target")
    drafter = folder_of(sentencepiece_tokenizer(), tmp_path / "drafter")
    (Path(drafter) / "added_tokens.json").write_text("{")
    with pytest.raises(ModelError, match=r"added_tokens.json: it is no JSON .*; get it again"):
        assert_fit(target, drafter)


def test_a_tokenizer_is_read_again_after_any_of_its_files_has_changed(tmp_path: Path) -> None:
    folder = Path(folder_of(sentencepiece_tokenizer(), tmp_path / "model"))
    before = folders.read_tokenizer(folder)
    assert folders.read_tokenizer(folder) is before
    with_config(str(folder), eos_token="<|tool|>")
    assert folders.read_tokenizer(folder).further == {"<|tool|>"}


def test_the_further_files_of_a_tokenizer_are_fetched_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, here = Path(folder_of(sentencepiece_tokenizer(), tmp_path / "hub")), tmp_path / "here"
    with_config(str(hub), eos_token="<|tool|>")
    (hub / "model.safetensors").write_bytes(b"large")

    def snapshot_download(_name: str, *, allow_patterns: list[str], **_: object) -> str:
        here.mkdir(exist_ok=True)
        for name in allow_patterns:
            if (hub / name).exists():
                shutil.copy(hub / name, here / name)
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = Tokenization.of_model("someone/model", None)
    assert found is not None
    assert found.raw.token_to_id("<|tool|>") == sentencepiece_tokenizer().get_vocab_size()
    assert not (here / "model.safetensors").exists()
    assert (folders.TOKENIZER, *BESIDE) == tokenizer_files.FILES
