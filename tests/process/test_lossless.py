"""`verify-lossless` passes on a right target and fails on a wrong one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cli import plugins
from coordinator.cli.app import main
from coordinator.launching import launcher
from proto.messages import Role
from tests.tiny_models import make_model, make_noised

pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    target = make_model("llama", folder / "target")
    drafter = make_noised(target, folder / "drafter", 0.3)
    return ["--target", str(target), "--drafter", str(drafter), "--policy", "sync", "--json"]


@pytest.mark.timed  # on a busy machine the drafter rests, and without drafts nothing is proved
def test_it_passes_for_a_pair_and_sees_the_planted_mistake(pair: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "coordinator", "verify-lossless", *pair],
        cwd=Path(launcher.ROOT),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout)
    assert report["passed"]
    assert report["verdict"] == "lossless"
    assert report["proved_for"].startswith("target in float32, exact on cpu")
    assert report["expected_s"] > 0
    kinds = [check["kind"] for check in report["checks"]]
    assert kinds == ["greedy", "seeds", *["sampled"] * 4]
    assert [check["held"] for check in report["checks"]] == [True] * 5 + [False]


@pytest.mark.slow
def test_it_fails_for_a_target_with_a_mistake(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(launcher.MODULES, Role.TARGET, "tests.process.biased_target")
    monkeypatch.setenv("SLIPSTREAM_TEST_BIAS", "accept_all_after_first")
    monkeypatch.setattr(sys, "argv", ["coordinator", "verify-lossless", *pair])
    assert main(plugins=plugins.commands()) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"]
    failed = [check["what"] for check in report["checks"] if not check["passed"]]
    assert failed == ["sync token", "sync block"]
