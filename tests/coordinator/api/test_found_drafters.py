"""What drafts for a target of somebody else, if that is left to us."""

import json
import shutil
from pathlib import Path

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.config_base import reviewed
from coordinator.api.models.named import DEFAULT
from coordinator.api.models.preflight import look_at
from coordinator.api.without_effect import without_effect
from proto.errors import ModelError
from proto.installation import MODELS
from tests.mtp import Plain

TARGET, DRAFTER = str(MODELS / "target"), str(MODELS / "drafter")
NONE = "drafter: ngram, since no drafter came with the target (drafter names another)"


def changed(folder: Path) -> None:
    """Give a folder a tokenizer of its own: one byte more, of no effect."""
    file = folder / "tokenizer.json"
    file.write_text(file.read_text() + " ")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target of the toy's shape that is no copy of it: its tokenizer is another file."""
    folder = tmp_path / "own"
    shutil.copytree(TARGET, folder)
    changed(folder)
    return folder


def drafter_of(target: Path, drafter: str = DEFAULT) -> str:
    """Return the name of what drafts for a target; the pair may be started."""
    config = PairConfig(target=str(target), drafter=drafter)
    look_at(config, drafts=True)
    return config.drafter


def test_what_nobody_named_is_what_auto_finds(folder: Path) -> None:
    assert drafter_of(folder) == drafter_of(folder, "auto") == "ngram"
    shutil.copytree(MODELS / "eagle", folder / "eagle")
    assert drafter_of(folder) == drafter_of(folder, "auto") == str(folder / "eagle")
    assert drafter_of(folder, "ngram") == "ngram"
    assert PairConfig(target="toy", drafter="auto").drafter == DRAFTER


def test_a_copy_of_the_toy_has_the_toys_drafter(tmp_path: Path) -> None:
    shutil.copytree(TARGET, tmp_path / "copy")
    assert drafter_of(tmp_path / "copy") == DRAFTER


def test_the_nearest_head_is_taken_and_then_the_better_kind(folder: Path) -> None:
    shutil.copytree(MODELS / "medusa", folder.with_name("medusa"))
    assert drafter_of(folder) == "ngram", "it may be for any model that lies there"
    shutil.copytree(MODELS / "medusa", folder.with_name("own-medusa"))
    assert drafter_of(folder) == str(folder.with_name("own-medusa"))
    shutil.copytree(MODELS / "eagle", folder / "eagle")
    assert drafter_of(folder) == str(folder / "eagle")
    shutil.copytree(MODELS / "eagle3", folder / "eagle3")
    assert drafter_of(folder) == str(folder / "eagle3")


def test_beside_heads_that_are_named_n_grams_draft(folder: Path) -> None:
    shutil.copytree(MODELS / "medusa", folder / "medusa")
    config = PairConfig(target=str(folder), heads=str(folder / "medusa"))
    assert (config.drafter, config.found_drafter) == ("ngram", [])
    config.check()


def test_another_drafter_in_a_copy_of_the_settings_was_not_found(folder: Path) -> None:
    shutil.copytree(MODELS / "medusa", folder / "medusa")
    changed = PairConfig(target=str(folder)).model_copy(update={"drafter": "ngram"})
    assert changed.found_drafter == reviewed(PairConfig, changed, "config").found_drafter == []


def test_what_does_not_fit_or_is_not_whole_is_passed_over(folder: Path) -> None:
    for name in ("eagle3", "eagle", "medusa"):
        shutil.copytree(MODELS / name, folder / name)
    config = folder / "eagle3/config.json"
    stated = json.loads(config.read_text())
    config.write_text(json.dumps(stated | {"hidden_size": 64}))
    shutil.copytree(MODELS / "eagle3", folder / "dflash")  # other weights than it says, and odd
    block = {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1]}}
    (folder / "dflash/config.json").write_text(json.dumps(stated | block))
    odd = folder.with_name("own-dflash")
    shutil.copytree(folder / "dflash", odd)
    (odd / "config.json").write_text(json.dumps(stated | block | {"layer_types": [["x"]]}))
    (folder / "eagle/model.safetensors").unlink()
    shutil.rmtree(folder / "medusa")
    shutil.copytree(DRAFTER, folder / "medusa")  # a whole model
    assert drafter_of(folder) == "ngram"


def test_the_layer_in_the_checkpoint_comes_before_a_head_beside_it(tmp_path: Path) -> None:
    target = Plain("glm4_moe").save(tmp_path / "glm")
    assert drafter_of(target) == "mtp"
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    assert drafter_of(target) == "ngram"


def test_what_was_found_is_said_and_counts_as_not_given(folder: Path) -> None:
    config = PairConfig(target=str(folder))
    assert config.found_drafter == [NONE]
    assert reviewed(PairConfig, config, "config").found_drafter == [NONE]
    shutil.copytree(MODELS / "medusa", folder / "medusa")
    config = PairConfig(target=str(folder), drafter="auto")
    (line,) = config.found_drafter
    assert line == f"drafter: {folder / 'medusa'}, found for the target (drafter names another)"
    assert not without_effect(config, SpeculationConfig(policy="ar"))
    named = PairConfig(target=str(folder), drafter="ngram")
    assert named.found_drafter == PairConfig(target="toy").found_drafter == []
    (line,) = without_effect(named, SpeculationConfig(policy="ar"))
    assert line.startswith("drafter has no effect")


def test_a_target_that_cannot_be_read_is_refused_where_it_is_checked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert PairConfig(target=str(tmp_path)).drafter == "ngram"
    with pytest.raises(ModelError, match="config"):
        look_at(PairConfig(target=str(tmp_path)), drafts=True)
