"""Experiments with real processes: whatever interrupts them, all rows are there in the end."""

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.experiments.rows import Row, read
from proto.installation import ROOT
from tests.process.patience import wait_for
from tests.process.test_faults import alive

pytestmark = [pytest.mark.process, pytest.mark.long]

SMALL = """
title = "Small"
question = "Is it all there?"
repetitions = 2
[fixed]
dtype = "float32"
max_tokens = 12
prompts = "prompts.txt"
temperature = 0.8
[[arms]]
policy = ["ar", "sync", "tree"]
"""
LIMIT_S = 120.0


def write_small(folder: Path) -> Path:
    (folder / "prompts.txt").write_text("def f(x):\nclass A:\nimport os\nfor i in\n")
    path = folder / "small.toml"
    path.write_text(SMALL)
    return path


def start(
    path: Path, out: Path, *more: str, prepare: Callable[[], None] | None = None
) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "coordinator", "experiment", str(path), "--out", str(out)]
    return subprocess.Popen(
        [*command, *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )


def texts(rows: Sequence[Row]) -> dict[Any, tuple[int, ...]]:
    return {row.key: row.tokens for row in rows}


def children(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "--no-headers", "-o", "pid", "--ppid", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(child) for child in listed.stdout.split()]


def wait_for_rows(out: Path, number: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    file = out / "rows.jsonl"
    while not file.exists() or file.read_bytes().count(b"\n") < number:
        assert time.monotonic() < deadline, "the experiment makes no rows"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """An experiment that nothing happened to: its file, and its rows."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_small(folder)
    process = start(path, folder / "out", "--report")
    said, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert "tree" in said
    assert max(map(len, said.splitlines()[:-3])) <= 80  # the last lines are paths
    return path, read(folder / "out" / "rows.jsonl")


def test_every_arm_writes_what_the_target_alone_writes_with_drafts_accepted(
    whole: tuple[Path, list[Row]],
) -> None:
    path, rows = whole
    assert len(rows) == 3 * 4 * 2
    alone = {row.key[1:]: row.tokens for row in rows if row.arm == "ar"}
    for row in rows:
        assert row.tokens == alone[row.key[1:]]
        assert len(row.tokens) == sum(row.accept_lengths) == 12
        assert row.figures is not None
        assert row.num_bytes > 0
        assert set(row.hosts) == {"target", "drafter"}
    assert any(row.accepted_by_source for row in rows if row.arm == "tree")
    header = json.loads((path.parent / "out" / "experiment.json").read_text())
    assert header["runs"][0]["versions"]["torch"]
    made = {file.name for file in (path.parent / "out").iterdir()}
    assert {"summary.csv", "speedup.png", "report.html"} <= made


def test_texts_alone_are_kept_and_the_same_command_writes_the_tables(
    whole: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    path, rows = whole
    out = tmp_path / "out"
    process = start(path, out, "--texts-only")
    said, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said) == (0, ""), errors
    assert errors.splitlines()[-1] == f"{out}: {len(rows)} texts"
    assert {file.name for file in out.iterdir()} == {"experiment.json", "rows.jsonl"}
    assert texts(read(out / "rows.jsonl")) == texts(rows)
    process = start(path, out)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert (out / "summary.csv").exists()


@pytest.mark.slow
def test_killed_twice_it_ends_with_the_same_rows(
    whole: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    path, rows = whole
    out = tmp_path / "out"
    for number in (4, 11):
        process = start(path, out)
        wait_for_rows(out, number)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)
        with (out / "rows.jsonl").open("ab") as file:
            file.write(b'{"arm":"sync","prom')  # as if it had died while it wrote
    process = start(path, out)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert "texts are in" in errors
    assert texts(read(out / "rows.jsonl")) == texts(rows)
    assert len((out / "rows.jsonl").read_bytes().splitlines()) == len(rows), "nothing twice"


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_rest_comes_when_there_is_room(
    whole: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    path, rows = whole
    out = tmp_path / "out"
    size = 9000  # bytes that a file may have: some rows fit

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    process = start(path, out, prepare=prepare)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert "(ulimit -f); the same command goes on" in last, errors
    assert "Traceback" not in errors
    kept = read(out / "rows.jsonl")
    assert 0 < len(kept) < len(rows)
    process = start(path, out)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert texts(read(out / "rows.jsonl")) == texts(rows)


@pytest.mark.slow
def test_interrupted_it_leaves_no_process_and_says_so(
    whole: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    path, _ = whole
    out = tmp_path / "out"
    process = start(path, out)
    wait_for_rows(out, 2)
    nodes = children(process.pid)
    assert len(nodes) >= 2, "tests may have a process more, from which nodes are forked"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1] == "interrupted"
    assert len(read(out / "rows.jsonl")) >= 2
    assert wait_for(lambda: not any(map(alive, nodes)), 10.0)


@pytest.mark.slow
def test_two_at_once_in_one_folder_and_another_experiment_there_are_refused(
    whole: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    path, rows = whole
    out = path.parent / "out"
    refused = start(path, out, "--set", "max_tokens=13")
    _, errors = refused.communicate(timeout=LIMIT_S)
    assert refused.returncode == 2
    assert "holds another experiment ('Small'), or this one with other settings" in errors
    assert texts(read(out / "rows.jsonl")) == texts(rows)
    first = start(path, tmp_path / "out")
    wait_for_rows(tmp_path / "out", 1)
    second = start(path, tmp_path / "out")
    _, errors = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 2
    assert "another experiment is being written to" in errors
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=LIMIT_S)
