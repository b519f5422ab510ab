"""The scripts of the kit: rows that are kept, limits that hold, and all of it in small on a CPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.gpu_kit import __main__ as kit_main
from lab.gpu_kit import checks, looks
from lab.gpu_kit.kit import ROWS, Kit
from lab.gpu_kit.start import ROOT
from tests.process.patience import wait_for
from tests.process.test_faults import alive


def kit_in(folder: Path, *, is_small: bool = False) -> Kit:
    return Kit("passes", folder, folder, "cpu", is_small, folder, time.monotonic() + 60.0)


def test_a_row_is_on_the_disk_at_once_and_says_how_far_it_is_from_what_was_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = kit_in(tmp_path)
    kit.row("target, 5 rows", {"ms": 5.0}, ms=6.0, backend="graphs")
    kit.row("drafter, 1 row", {"ms": 1.0}, ms=0.25)
    kit.row("a load", seconds=3.0)
    rows = [json.loads(line) for line in (tmp_path / ROWS).read_text().splitlines()]
    assert [row["figures"] for row in rows] == [
        {"ms": 6.0, "backend": "graphs"},
        {"ms": 0.25},
        {"seconds": 3.0},
    ]
    assert capsys.readouterr().out.splitlines()[0] == (
        "target, 5 rows: ms 6 (1.20 of the expected 5), backend graphs"
    )
    found = looks.surprises(kit)
    assert found == ["drafter, 1 row: ms 0.25 of expected", "target, 5 rows: ms 1.20 of expected"]


def test_a_rehearsal_is_compared_with_nothing(tmp_path: Path) -> None:
    kit_in(tmp_path, is_small=True).row("target, 5 rows", {"ms": 5.0}, ms=6.0)
    assert looks.surprises(kit_in(tmp_path)) == []


def test_a_script_that_hangs_is_ended_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit_main, "END_S", 0.5)
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"print(child.pid, file=open({str(pid)!r}, 'w'), flush=True)\n"
        "time.sleep(60)"
    )
    began_s = time.monotonic()
    problem = kit_main.run([sys.executable, "-c", code], tmp_path / "log.txt", 1.0)
    assert "its rows are kept" in problem
    assert time.monotonic() - began_s < 20
    assert wait_for(lambda: not alive(int(pid.read_text())), 5.0)


def test_a_script_that_fails_says_why_in_its_last_line(tmp_path: Path) -> None:
    code = "raise SystemExit('no such model')"
    problem = kit_main.run([sys.executable, "-c", code], tmp_path / "log.txt", 20.0)
    assert problem == "no such model"


def test_every_test_that_needs_a_gpu_is_run() -> None:
    named = {f"test_{name}_on_gpu.py" for name in checks.FILES}
    assert named == {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


def rehearse(tmp_path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "lab.gpu_kit", "--small", *options]
    command += ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    return subprocess.run(
        *(command,),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.process
@pytest.mark.slow
def test_a_rehearsal_measures_all_that_a_cpu_can_show(tmp_path: Path) -> None:
    ended = rehearse(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = (tmp_path / "out" / ROWS).read_text().splitlines()
    rows = {row["what"]: row["figures"] for row in map(json.loads, lines)}
    assert rows["target, 5 rows after 60"]["ms"] > 0
    assert rows["choice at 0.8, 17 rows"]["ms"] > 0
    for arm in ("own process", "at home", "own process, polled"):
        sync = rows[f"{arm}: sync at 0.0"]
        assert sync["tokens_pass"] > 1.0, "no draft was accepted"
        assert 0 < sync["idle_ms"] < sync["round_ms"], "time in which no pass was computed"
    assert rows["own process: 8 texts at once, auto"]["tokens_s"] > 0
    why = {row["why"] for row in rows.values() if "result" in row}
    assert why == {"no CUDA device", "one CUDA device", "no MPS"}


@pytest.mark.process
def test_what_cannot_be_written_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    ended = rehearse(tmp_path, "--script", "passes")
    assert ended.returncode == 2
    assert ended.stderr == (
        f"error: {tmp_path / 'out'} cannot be written (File exists); use --out\n"
    )
