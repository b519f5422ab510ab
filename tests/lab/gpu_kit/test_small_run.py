"""The kit from end to end on a CPU, all of it tiny."""

import subprocess
import sys
from pathlib import Path

import pytest

from lab.gpu_kit.plan import PLAN, Outcome
from lab.gpu_kit.recorder import FILE, read
from lab.gpu_kit.start import ROOT

pytestmark = pytest.mark.process


def rehearse(tmp_path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "lab.gpu_kit", "--small", *options]
    command += ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_a_part_runs_once_and_its_report_is_written(tmp_path: Path) -> None:
    ended = rehearse(tmp_path, "--part", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = read(tmp_path / "out" / FILE)
    measured = {row.cell for row in rows if row.state == "measured"}
    assert {"python", "torch"} <= measured
    notes = {row.note for row in rows if row.step == "flex-tests" and row.state == "skipped"}
    assert notes == {"no CUDA device"}
    assert "Tests of the engine" in (tmp_path / "out" / "report.txt").read_text()
    again = rehearse(tmp_path, "--part", "1")
    assert again.returncode == 0
    assert "part 1" not in again.stdout
    assert read(tmp_path / "out" / FILE) == rows


@pytest.mark.slow
def test_a_rehearsal_measures_all_that_a_cpu_can_show(tmp_path: Path) -> None:
    ended = rehearse(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = read(tmp_path / "out" / FILE)
    outcome = Outcome.of(rows)
    assert outcome.skipped == ("texts-mps",)
    assert set(outcome.done) == {step.name for step in PLAN} - {"texts-mps"}
    figures = {(row.step, row.cell): row.figures for row in rows}
    assert figures["passes-target", "fused 200|5 rows"]["pass_ms"] > 0
    assert figures["profile-drafter", "whole pass"]["calls"] > 0
    assert figures["texts", "sync default T=0.0"]["speedup"] > 0
