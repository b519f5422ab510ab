"""Logs stay after a run, within limits, for this user alone; and never end anything."""

import logging
import os
import re
import signal
from pathlib import Path

import pytest

from coordinator.launching import logs as module
from coordinator.launching.logs import Logs, latest, runs, runtime_folders, state_folder, tail


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs are."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "slipstream" / "logs"


def test_a_log_stays_when_its_run_has_ended_and_each_line_has_its_time(
    state: Path, tmp_path: Path
) -> None:
    logs = Logs(tmp_path)
    logs.note("the drafter\nis lost \x1b[31m")
    assert latest() is None, "it goes on"
    assert runtime_folders() == [tmp_path]
    logs.close()
    assert latest() == logs.folder
    assert runtime_folders() == []
    (line,) = tail(logs.folder, 5)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z the drafter is lost \?\[31m", line)
    assert module.without_stamp(line).startswith("the drafter")
    assert module.without_stamp("2026 was a year") == "2026 was a year"


def test_nobody_else_can_read_it(state: Path, tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.note("a line")
    path = logs.of_node("target-1")
    modes = [one.stat().st_mode & 0o777 for one in (state, logs.folder, path)]
    assert modes == [0o700, 0o700, 0o600]
    assert {one.stat().st_mode & 0o077 for one in logs.folder.iterdir()} == {0}


def test_the_latest_runs_stay_and_those_that_go_on(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RUNS", 3)
    first = Logs(tmp_path)
    ended = [Logs(tmp_path) for _ in range(5)]
    for one in ended:
        one.close()
    mine, other = Logs(tmp_path), Logs(tmp_path)
    left = set(runs(state))
    assert {first.folder, mine.folder, other.folder} <= left
    assert len(left) == 3 + 2


def test_the_run_that_ended_last_is_the_latest_also_if_it_began_first(
    state: Path, tmp_path: Path
) -> None:
    long, short = Logs(tmp_path), Logs(tmp_path)
    for number, (logs, line) in enumerate([(long, "a"), (short, "b"), (long, "it died")]):
        logs.note(line)
        written = logs.folder / module.COORDINATOR_LOG
        os.utime(written, ns=(0, (number + 1) * 10**9))
    for logs in (long, short):
        logs.close()
    assert latest() == long.folder
    assert runs(state) == [short.folder, long.folder]


def test_runs_that_began_in_one_second_are_ordered_by_their_end_and_not_by_their_names(
    state: Path, tmp_path: Path
) -> None:
    for number, name in enumerate(["20260301-120000-99", "20260301-120000-100"]):
        folder = state / name
        folder.mkdir(parents=True)
        log = folder / module.COORDINATOR_LOG
        log.touch()
        os.utime(log, ns=(0, (number + 1) * 10**9))
    assert [run.name[-3:] for run in runs(state)] == ["-99", "100"]


def test_runs_of_nodes_alone_do_not_push_out_those_of_coordinators(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RUNS", 3)
    coordinator = Logs(tmp_path)
    coordinator.note("everything ends: the target died")
    coordinator.close()
    for number in range(6):  # as on a host of a Ray cluster
        node = Logs(tmp_path)
        node.of_node(f"drafter-1.{number}").write_bytes(b"x" * 1000)
        node.close()
    assert latest() == coordinator.folder
    assert len(runs(state)) == 1 + 3
    monkeypatch.setattr(module, "MAX_RUNS_BYTES", 900)
    Logs(tmp_path)
    assert len(runs(state)) == 1 + 1


def test_runs_that_are_too_large_together_go(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = Logs(tmp_path)
    large.of_node("target-1").write_bytes(b"x" * 1000)
    large.close()
    monkeypatch.setattr(module, "MAX_RUNS_BYTES", 900)
    mine = Logs(tmp_path)
    assert runs(state) == [mine.folder]


def test_a_log_that_becomes_long_keeps_its_end(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 400)
    logs = Logs(tmp_path)
    for number in range(100):
        logs.note(f"line {number}")
    own = logs.folder / module.COORDINATOR_LOG
    assert own.stat().st_size < 500
    assert own.with_name(own.name + module.OLDER).stat().st_size < 500
    assert tail(logs.folder, 1)[0].endswith("line 99")
    path = logs.of_node("target-1")
    with path.open("a") as node:  # as a node writes
        for number in range(100):
            node.write(f"line {number}\n")
            node.flush()
            logs.trim()
    assert path.stat().st_size <= 400
    written = path.with_name(path.name + module.OLDER).read_text() + path.read_text()
    assert written.endswith("line 99\n")
    assert "\0" not in written


def test_of_drafters_that_are_started_again_the_latest_have_logs(
    state: Path, tmp_path: Path
) -> None:
    logs = Logs(tmp_path)
    for number in range(50):
        logs.of_node(f"drafter-1.{number}")
    names = {path.name for path in logs.folder.glob("drafter*")}
    assert len(names) == module.MAX_NODE_LOGS
    assert "drafter-1.49.log" in names


@pytest.mark.parametrize("home", ["a file", "no right", "nothing"])
def test_where_nothing_can_be_kept_one_line_says_so(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "home"
    place.touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(place))
    if home == "no right":
        monkeypatch.setenv("XDG_STATE_HOME", "/proc/self/nothing")
    if home == "nothing":
        monkeypatch.setenv("XDG_STATE_HOME", "relative")
        monkeypatch.setenv("HOME", str(place))
    fallback = tmp_path / "runtime"
    fallback.mkdir()
    logs = Logs(fallback)
    logs.note("a line")
    assert len(tail(fallback, 5)) == 1
    assert logs.folder == fallback
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1


def test_a_full_disk_ends_nothing_and_is_said_once(
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    logs = Logs(tmp_path)

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    for _ in range(3):
        logs.note("a line")
    assert logs.of_node("target-1") == Path(os.devnull)
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_the_folder_is_where_the_convention_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_STATE_HOME", "relative/paths/do/not/count")
    assert state_folder() == Path("/home/somebody/.local/state/slipstream/logs")
    monkeypatch.setenv("XDG_STATE_HOME", "/elsewhere")
    assert state_folder() == Path("/elsewhere/slipstream/logs")


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(
    state: Path, tmp_path: Path
) -> None:
    logs = Logs(tmp_path)
    with logs._writing:  # as a thread does that writes a line
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            logs.note("the child")
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    logs.close()
    assert state.is_dir()
