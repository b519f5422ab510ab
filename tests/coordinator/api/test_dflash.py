"""A DFlash head as a drafter: how it is found, and what is refused before a node starts."""

import json
from pathlib import Path

import pytest

from coordinator.api.config import PairConfig
from coordinator.api.models.preflight import look_at
from coordinator.api.vllm import read
from proto.errors import ConfigurationError, ModelError
from proto.head_kinds import HeadKind
from tests.dflash import BLOCK, save_right
from tests.tiny_models import make_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target beside whose folder lies such a head."""
    save_right(make_model("llama", tmp_path / "llama"), tmp_path / "own", tmp_path / "own-dflash")
    return tmp_path / "own"


def test_it_is_found_beside_its_target_and_drafts_at_home(folder: Path) -> None:
    config = PairConfig(target=str(folder))
    assert config.drafter == str(folder.with_name("own-dflash"))
    assert (config.drafter_head, config.layers) == (HeadKind.DFLASH, (1, -1))
    assert config.home_drafter == (config.drafter, None)
    look_at(config, drafts=True)
    own = PairConfig(target=str(folder), drafter_home="own")
    assert own.has_draft_process
    look_at(own, drafts=True)


def test_vllms_name_of_it_is_known(folder: Path) -> None:
    head = str(folder.with_name("own-dflash"))
    speculation = read({"method": "dflash", "model": head, "num_speculative_tokens": BLOCK - 1})
    speculation.check_kind(PairConfig(target=str(folder), drafter=head))
    with pytest.raises(ConfigurationError, match="is a head of the kind dflash"):
        read({"method": "eagle3", "model": head}).check_kind(
            PairConfig(target=str(folder), drafter=head)
        )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"num_target_layers": 9}, "num_target_layers is 9, but .* has 3"),
        ({"dflash_config": {"block_size": 4, "target_layer_ids": [0]}}, "mask_token_id is null"),
        ({"dflash_config": {}}, "features of layers that .* does not have"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_node_starts(
    change: dict[str, object], line: str, folder: Path
) -> None:
    head = folder.with_name("own-dflash")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | change))
    assert PairConfig(target=str(folder)).drafter == "ngram", "it is passed over"
    with pytest.raises(ModelError, match=line):
        look_at(PairConfig(target=str(folder), drafter=str(head)), drafts=True)


def test_its_matrices_are_not_rounded(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="the drafter is a DFlash head"):
        PairConfig(target=str(folder), drafter_quantization="int8").check()
