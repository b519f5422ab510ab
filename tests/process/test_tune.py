"""`tune` lets the nodes load one after another, times anew, and says what came of it."""

import json
import subprocess
import sys

import pytest

from coordinator.api.config import PairConfig
from coordinator.api.pair import Pair
from coordinator.cluster.service import Service
from proto.installation import ROOT
from proto.messages import Role
from proto.node_config import NodeConfig
from proto.system import cache_folder
from tests.tiny_models import make_model, make_noised

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PairConfig:
    """A random model, and a drafter for it."""
    folder = tmp_path_factory.mktemp("models")
    target = make_model("llama", folder / "target")
    drafter = make_noised(target, folder / "drafter", 0.1)
    return PairConfig(target=str(target), drafter=str(drafter), dtype="bfloat16", max_model_len=512)


@pytest.mark.parametrize("tuned", [["drafter"], []], ids=["tune", "usually"])
def test_nodes_load_one_after_another(
    tuned: list[str], config: PairConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_target: list[str] = []
    launch = Service.launch

    def noted(self: Service, node: NodeConfig) -> None:
        assert node.tunes is bool(tuned)
        if self.registry.hellos(Role.TARGET):
            after_target.append(str(node.role))
        launch(self, node)

    monkeypatch.setattr(Service, "launch", noted)
    with Pair(config, tunes=bool(tuned)) as pair:
        assert set(pair.states()) == set(Role)
    assert after_target == tuned


def test_the_command_keeps_what_it_finds(config: PairConfig) -> None:
    command = [sys.executable, "-m", "coordinator", "tune", "--target", config.target]
    command += ["--drafter", config.drafter, "--dtype", "bfloat16", "--max-model-len", "512"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "target: fused, bfloat16" in ran.stdout
    assert "drafter computed by" in ran.stdout
    kept = json.loads(cache_folder("choices.json").read_text())
    assert True in kept["exact"].values()
