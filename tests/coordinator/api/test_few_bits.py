"""What is asked about weights in few bits reaches the nodes, or is refused for a reason."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.api.config import PairConfig
from coordinator.api.models.nodes import node_configs
from proto.errors import ConfigurationError, ModelError
from proto.installation import MODELS
from proto.messages import Role
from tests.gguf_models import save_gguf
from tests.tiny_models import make_model


def test_each_node_is_told_how_its_weights_are_rounded() -> None:
    config = PairConfig(quantization="int4", drafter_quantization="int8")
    nodes = node_configs(config, endpoint="", outside="", secret="", drafts=True)
    assert {node.role: node.quantization for node in nodes} == {
        Role.TARGET: "int4",
        Role.DRAFTER: "int8",
    }
    (alone,) = node_configs(PairConfig(), endpoint="", outside="", secret="", drafts=False)
    assert alone.quantization == ""


EAGLE = str(MODELS / "eagle")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, "int4"),
        ({"drafter_quantization": "int4"}, "int4"),
        ({"drafter_dtype": "float32"}, ""),
        ({"drafter_dtype": "float32", "drafter_quantization": "int8"}, "int8"),
    ],
)
def test_an_eagle_head_is_rounded_unless_a_number_type_is_asked_for(
    settings: dict[str, Any], wanted: str
) -> None:
    for models in ({"drafter": EAGLE}, {"drafter": EAGLE, "drafter_home": "target"}):
        config = PairConfig(**models, **settings)
        config.check()
        nodes = node_configs(config, endpoint="", outside="", secret="", drafts=True)
        heads = [node.quantization for node in nodes if node.role is Role.DRAFTER]
        heads += [node.home_quantization for node in nodes if node.home_drafter]
        assert heads == [wanted]
        assert all(node.quantization == "" for node in nodes if node.role is Role.TARGET)


def test_a_medusa_head_is_not_rounded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 4}')
    config = PairConfig(drafter=str(tmp_path), drafter_quantization="int8")
    with pytest.raises(ConfigurationError, match="an EAGLE head, and the drafter is a Medusa head"):
        config.check()


def test_a_file_is_named_by_the_folder_that_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, _ = save_gguf(make_model("llama", tmp_path / "source"), tmp_path, lambda _: "Q8_0")
    file = folder / "model.gguf"
    target = PairConfig(target=str(file)).target
    assert Path(target).is_relative_to(tmp_path / "cache")
    assert (Path(target) / "model.gguf").samefile(file)
    with pytest.raises(ModelError, match=r"nowhere\.gguf: no such file; give a GGUF file or a"):
        PairConfig(target=str(tmp_path / "nowhere.gguf"))
