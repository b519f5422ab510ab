"""`tune` lets the nodes load one after another, times anew, and says what came of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.api.config import PairConfig
from coordinator.api.pair import Pair
from proto.installation import ROOT
from proto.messages import Role
from proto.node_config import READY_BUT
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


def _is_loading(state: str) -> bool:
    """True if a node has begun to load and is not ready."""
    return state not in ("starting", "ready") and not state.startswith(READY_BUT)


@pytest.mark.parametrize("most", [1, 2], ids=["tune", "usually"])
def test_nodes_load_one_after_another(most: int, config: PairConfig) -> None:
    seen: list[dict[Role, str]] = []
    with Pair(config, say=lambda states: seen.append(dict(states)), tunes=most == 1):
        pass
    assert set(seen[-1]) == set(Role)
    at_once = [sum(_is_loading(state) for state in states.values()) for states in seen]
    assert most == max(at_once)


def test_the_command_finds_again_what_was_kept(config: PairConfig) -> None:
    command = [sys.executable, "-m", "coordinator", "tune", "--target", config.target]
    command += ["--drafter", config.drafter, "--dtype", "bfloat16", "--max-model-len", "512"]
    with Pair(config, with_drafter=False):
        pass
    table = cache_folder("choices.json")
    before = table.stat().st_mtime_ns
    with Pair(config, with_drafter=False):
        pass
    assert table.stat().st_mtime_ns == before, "a later start finds what the first has kept"

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "target: fused, bfloat16" in ran.stdout
    assert "drafter computed by" in ran.stdout
    assert table.stat().st_mtime_ns > before
    kept = json.loads(Path(table).read_text())
    assert True in kept["exact"].values()
