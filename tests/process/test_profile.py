"""`profile` says where the time goes, and what it says adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.launching import launcher
from proto.stopwatch import Phase
from tests.tiny_models import make_model, make_noised

pytestmark = pytest.mark.process


def run(*options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "coordinator", "profile", *options],
        cwd=Path(launcher.ROOT),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_every_phase_of_every_process_is_told_and_models_are_told_apart(tmp_path: Path) -> None:
    target = make_model("llama", tmp_path / "target")
    drafter = make_noised(target, tmp_path / "drafter", 0.1)
    pair = ["--target", str(target), "--drafter", str(drafter), "--max-tokens", "24"]
    report = json.loads(run(*pair, "--policy", "sync", "--json"))
    assert report["num_tokens"] == 3 * 24
    assert report["tokens_per_pass"] > 1.2
    shares = {share["process"]: share for share in report["shares"]}
    assert list(shares) == ["target", "drafter", "coordinator"]
    assert (shares["target"]["unit"], shares["drafter"]["unit"]) == ("pass", "step")
    assert shares["target"]["number"] >= report["num_passes"] > 0
    assert shares["drafter"]["number"] > 0
    elapsed_s = report["num_tokens"] / report["tokens_per_second"]
    for name, share in shares.items():
        assert set(share["ms"]) == {phase.name.lower() for phase in Phase}
        busy_s = sum(ms for phase, ms in share["ms"].items() if phase != "wait") / 1e3
        assert 0 < share["number"] * busy_s < elapsed_s
        has_model = name != "coordinator"
        assert (share["ms"]["model"] > 0) == (share["ms"]["choose"] > 0) == has_model
        assert share["ms"]["decide"] > 0
        assert share["ms"]["send"] > 0


@pytest.mark.long
def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    target = make_model("llama", tmp_path / "target")
    pair = ["--target", str(target), "--policy", "ar", "--max-tokens", "8"]
    text = run(*pair)
    table = text.partition("\n")[2]
    assert "noise and choice" in table
    assert "beside" not in table
    assert max(map(len, table.splitlines())) <= 80


SIMULATED = ("--simulate-target-ms", "12", "--simulate-draft-ms", "3")


@pytest.mark.slow
def test_on_devices_a_model_takes_its_whole_time_and_all_adds_up() -> None:
    options = ("--policy", "tree", "--max-tokens", "24", *SIMULATED)
    report = json.loads(run(*options, "--json"))
    elapsed_ms = report["num_tokens"] / report["tokens_per_second"] * 1e3
    shares = {share["process"]: share for share in report["shares"]}
    for name, least_ms in (("target", 12.0), ("drafter", 3.0)):
        share = shares[name]
        assert share["ms"]["model"] >= 0.99 * least_ms  # whatever the host did in that time
        assert share["number"] * sum(share["ms"].values()) == pytest.approx(elapsed_ms)
        beside_ms = share["beside_ms"]
        assert beside_ms["decide"] > 0
        assert 0 < sum(beside_ms.values()) < share["ms"]["model"]
    assert shares["coordinator"]["beside_ms"] == {}
    table = run(*options).partition("\n")[2]
    lines = table.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["target", "beside", "drafter", "beside", "coordinator"]
    (together,) = [line for line in lines if line.startswith("together")]
    assert together.split().count("100%") == 3
