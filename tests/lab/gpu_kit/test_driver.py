"""The driver: what it runs, what it goes on with, and how it ends what hangs."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lab.gpu_kit import driver
from lab.gpu_kit.driver import LOG, PAGE, TABLES, Settings, run, words
from lab.gpu_kit.plan import PLAN, Machine, Step
from lab.gpu_kit.recorder import FILE, Recorder, read
from proto.errors import ConfigurationError

NAME = "a machine"
HERE = "tests.lab.gpu_kit."


def settings(tmp_path: Path, *parts: int, limit_s: float = 540.0) -> Settings:
    return Settings(
        parts=parts,
        out=tmp_path / "out",
        work=tmp_path / "work",
        device="cpu",
        is_small=True,
        prompts=tmp_path / "prompts.jsonl",
        limit_s=limit_s,
        started=time.monotonic(),
        earlier=(tmp_path / "earlier", tmp_path / "kept"),
        kept=tmp_path / "kept",
    )


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the steps that were run; all end well but those whose name has `engine` in it."""
    names: list[str] = []

    def run_process(step: Step, given: Settings, name: str, most_s: float) -> str:
        names.append(step.name)
        if "engine" in step.name:
            return "it broke"
        Recorder(given.out / FILE, step.name, name).done(1.0)
        return ""

    monkeypatch.setattr(driver, "_run_process", run_process)
    monkeypatch.setattr(driver, "_ask", lambda _: (Machine(why_no_mps="no daemon"), NAME))
    return names


def test_a_run_goes_on_with_what_failed_and_what_is_left(tmp_path: Path, ran: list[str]) -> None:
    outcome = run(settings(tmp_path, 1), lambda _: None)
    assert ran == ["versions", "engine-tests", "flex-tests"]
    assert outcome.failed == ("engine-tests",)
    assert outcome.left == ()
    ran.clear()
    outcome = run(settings(tmp_path), lambda _: None)
    assert ran == [
        "engine-tests",
        *(step.name for step in PLAN if step.part > 1 and not step.needs),
    ]
    assert outcome.skipped == ("texts-mps",)
    ran.clear()
    run(settings(tmp_path), lambda _: None)
    assert ran == ["engine-tests"]
    skipped = [row for row in read(tmp_path / "out" / FILE) if row.state == "skipped"]
    assert [row.note for row in skipped] == ["no daemon"], "said once, and not at every run"


def test_without_time_nothing_is_begun_and_the_report_says_so(
    tmp_path: Path, ran: list[str]
) -> None:
    outcome = run(settings(tmp_path, 1, limit_s=6.0), lambda _: None)
    assert ran == []
    assert outcome.left == ("versions", "engine-tests", "flex-tests")
    assert "not run yet" in (tmp_path / "out" / TABLES).read_text()
    assert (tmp_path / "out" / PAGE).exists()


def test_results_of_earlier_calls_are_taken_over(tmp_path: Path, ran: list[str]) -> None:
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "texts.tar.gz").write_text("kept")
    Recorder(tmp_path / "earlier" / FILE, "versions", NAME).done(1.0)
    run(settings(tmp_path, 1), lambda _: None)
    assert ran == ["engine-tests", "flex-tests"]
    assert (tmp_path / "out" / "texts.tar.gz").read_text() == "kept"


def test_a_call_with_a_new_folder_goes_on_where_the_last_one_stopped(
    tmp_path: Path, ran: list[str]
) -> None:
    given = settings(tmp_path, 1)
    run(given, lambda _: None)
    ran.clear()
    said: list[str] = []
    outcome = run(replace(given, out=tmp_path / "another"), said.append)
    assert ran == ["engine-tests"], "which failed"
    assert f"goes on with what {tmp_path / 'kept'} has" in said
    assert "flex-tests" in outcome.done


def test_results_of_another_machine_are_not_mixed_in(tmp_path: Path, ran: list[str]) -> None:
    (tmp_path / "out").mkdir()
    Recorder(tmp_path / "out" / FILE, "versions", "another machine").done(1.0)
    with pytest.raises(ConfigurationError, match="another machine"):
        run(settings(tmp_path, 1), lambda _: None)
    assert ran == []


def test_the_last_words_name_what_failed_and_the_command_that_goes_on(
    tmp_path: Path, ran: list[str]
) -> None:
    given = settings(tmp_path, 1)
    said = words(run(given, lambda _: None), given, ["python3", "start.py", "--part", "1"])
    assert "left: engine-tests; the same command goes on: python3 start.py --part 1" in said


def process_step(monkeypatch: pytest.MonkeyPatch, mode: str, limit_s: float) -> Step:
    monkeypatch.setattr(driver, "MODULES", HERE)
    return Step(mode, 1, "a step", "process", limit_s, 1.0, (mode,))


@pytest.mark.process
def test_a_step_that_hangs_is_ended_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(tmp_path, 1)
    given.out.mkdir()
    step = process_step(monkeypatch, "hang", 2.0)
    assert driver._run_process(step, given, NAME, 2.0).startswith("ended after its 2 s")
    rows = read(given.out / FILE)
    assert [row.cell for row in rows] == ["child"], "what was measured is kept"
    child = int(rows[0].figures["pid"])
    deadline = time.monotonic() + 5.0
    while Path(f"/proc/{child}").exists() and not is_zombie(child):
        assert time.monotonic() < deadline, "the child outlives the step"
        time.sleep(0.05)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.process
def test_the_last_line_of_a_step_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(tmp_path, 1)
    given.out.mkdir()
    step = process_step(monkeypatch, "fail", 20.0)
    assert driver._run_process(step, given, NAME, 20.0) == "this is why"
    assert "this is why" in (given.out / LOG).read_text()
    assert os.getpgid(0) == os.getpgrp(), "the group of the test itself was not touched"
