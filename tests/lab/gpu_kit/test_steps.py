"""What steps of the kit run: passes, tests that are there, what texts say."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.errors import OutOfMemory
from lab.gpu_kit.plan import PLAN
from lab.gpu_kit.start import ROOT
from lab.gpu_kit.steps import passes, tests, texts
from lab.gpu_kit.steps.context import run_step


class Record:
    """In place of a `Recorder`: the state of each cell, by its name."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}

    def has(self, _: str) -> bool:
        return False

    def measured(self, cell: str, **_: float) -> None:
        self.states[cell] = "measured"

    def failed(self, cell: str, note: str) -> None:
        self.states[cell] = note

    skipped = failed


@pytest.mark.parametrize(
    "error", [OutOfMemory("no memory"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_pass_without_memory_is_one_cell_that_fails(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(_executor: object, length: int, _num_rows: int) -> tuple[float, float]:
        if length == 4000:
            raise error
        return 0.1, 0.01

    executor = SimpleNamespace(free=lambda: None)
    monkeypatch.setattr(passes, "load_model", lambda *_, **__: None)
    monkeypatch.setattr(passes, "make_executor", lambda *_, **__: executor)
    monkeypatch.setattr(passes, "read_up_to", lambda _executor, _start, end: end)
    monkeypatch.setattr(passes, "pass_seconds", seconds)
    context: Any = SimpleNamespace(device="cpu", is_small=True, record=Record(), which="target")
    passes._time(context, "model", "graphs", [("a", 500, 1), ("b", 4000, 1), ("c", 500, 1)])
    assert context.record.states == {"a": "measured", "b": str(error), "c": "measured"}


def test_a_step_without_memory_says_so_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"step": "profile", "out": tmp_path, "work": tmp_path, "prompts": tmp_path}
    options = [f"--{name}={value}" for name, value in given.items()]
    monkeypatch.setattr(sys, "argv", ["profile", *options, "--device=cpu", "--limit-s=9"])

    def fails(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert run_step(fails) != 0
    assert capsys.readouterr().err == "CUDA out of memory\n"


def test_every_test_that_needs_a_gpu_is_in_a_step() -> None:
    named = {f"test_{name}_on_gpu.py" for names in tests.FILES.values() for name in names}
    assert named == {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    steps = {step.arguments[0] for step in PLAN if step.module == "tests"}
    assert steps == set(tests.FILES)


def test_texts_say_what_the_host_of_the_target_takes() -> None:
    rows: Any = [
        SimpleNamespace(
            tokens_per_second=100.0,
            wall_s=1.0,
            ttft_s=0.1,
            tokens=(1, 2, 3),
            accept_lengths=(1, 2),
            figures={"host_ms_per_pass": host_ms},
        )
        for host_ms in (0.2, 0.3, 0.9)
    ]
    assert texts.figures(rows, ())["host_ms"] == 0.3


class _Stubborn:
    """A daemon that does not end; it notes how it is told to, and how long is waited."""

    def __init__(self) -> None:
        self.noted: list[str | float] = []

    def poll(self) -> None:
        self.noted.append("poll")

    def terminate(self) -> None:
        self.noted.append("terminate")

    def kill(self) -> None:
        self.noted.append("kill")

    def wait(self, limit_s: float) -> None:
        self.noted.append(limit_s)
        raise subprocess.TimeoutExpired("daemon", limit_s)


def test_a_daemon_that_does_not_end_has_its_own_time_limit_and_not_that_of_the_texts() -> None:
    daemon: Any = _Stubborn()
    texts._end(daemon)
    assert daemon.noted == ["poll", 10.0, "terminate", 10.0, "kill", 10.0]
