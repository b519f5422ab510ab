"""A program that was forked sees what it would see if it had been started, and ends as it would."""

import json
import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.forking.popen import ROOT, forking
from tests.forking.server import (
    MAX_NAME,
    OF_TESTS,
    PROGRAMS,
    TEST_NODES,
    command_of,
    is_server,
    name_of,
)
from tests.forking.shown import READ_AT_LOAD
from tests.process.test_faults import children, wait_for

pytestmark = pytest.mark.process

SHOWN = [sys.executable, "-m", "tests.forking.shown"]


def shown(*, status: int = 0, env: dict[str, str] | None = None, **more: Any) -> tuple[bool, Any]:
    """Run the program, which exits with `status`; return whether it was forked, and what it saw."""
    done = subprocess.run(
        [*SHOWN, str(status)],
        input="a line\n",
        cwd=ROOT,
        env={**os.environ, "ASKED_BY": str(os.getpid()), **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **more,
    )
    assert (done.returncode, done.stderr) == (status, "")
    made = json.loads(done.stdout)
    return made["is_forked"], made["seen"]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"process_group": 0},
        {"start_new_session": True},
        {"status": 3},
        {"env": {"TMPDIR": "/var/tmp", "TOKENIZERS_PARALLELISM": "false"}},
    ],
    ids=str,
)
def test_a_forked_program_sees_what_a_started_one_sees(how: dict[str, Any]) -> None:
    is_forked, forked = shown(**how)
    assert is_forked
    with forking(None):
        is_forked, started = shown(**how)
    assert not is_forked
    assert forked == started
    assert forked["line"] == "a line\n"


def test_ignored_and_blocked_signals_and_cores_are_those_of_who_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, cores = signal.signal(signal.SIGINT, signal.SIG_IGN), os.sched_getaffinity(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.sched_setaffinity(0, {min(cores)})
    mask = os.umask(0o027)
    try:
        is_forked, forked = shown()
        with forking(None):
            _, started = shown()
    finally:
        os.umask(mask)
        os.sched_setaffinity(0, cores)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGINT, before)
    assert is_forked
    assert forked == started
    assert (forked["blocked"], forked["cores"]) == ([signal.SIGUSR1], [min(cores)])
    assert forked["umask"] == 0o027


def test_what_libraries_read_when_they_are_loaded_starts_a_program_really() -> None:
    assert shown(env={"OTHER": "1"})[0]
    assert not shown(env={READ_AT_LOAD: "7"})[0]


def test_programs_have_names_that_tell_them_apart_and_all_of_them_are_there() -> None:
    assert len({name_of(module) for module in PROGRAMS}) == len(PROGRAMS)
    assert all(len(name) <= MAX_NAME for name in TEST_NODES)
    assert all(find_spec(module) is not None for module in PROGRAMS)


def test_a_node_of_a_test_is_forked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TEST_FAILURE", "killed load")
    command = [sys.executable, "-m", f"{OF_TESTS}failing_drafter"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        assert wait_for(lambda: command_of(process.pid) == command[2], 10.0)
        assert b"tests.forking.server" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.kill()


def test_a_descriptor_that_is_passed_is_there_under_its_number() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.dup2(theirs.fileno(), number := 47, inheritable=False)
        is_forked, forked = shown(pass_fds=(number,), env={"SAID_TO": str(number)})
        assert is_forked
        assert ours.recv(16) == b"said"
        with forking(None):
            is_forked, started = shown(pass_fds=(number,), env={"SAID_TO": str(number)})
        os.close(number)
        assert not is_forked
        assert ours.recv(16) == b"said"
    assert forked == started


def test_another_folder_and_another_module_are_started_really(tmp_path: Path) -> None:
    done = subprocess.run([*SHOWN, "0"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "No module named" in done.stderr
    name = subprocess.run(
        [sys.executable, "-c", "import sys; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert name.stdout == "False\n"


def test_a_signal_ends_a_forked_program_as_any_other() -> None:
    environment = {**os.environ, "ASKED_BY": str(os.getpid())}
    with subprocess.Popen(
        [*SHOWN, "0"], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert wait_for(lambda: command_of(process.pid) == SHOWN[2], 10.0)
        assert children(os.getpid()).count(process.pid) == 1
        process.kill()
        assert process.wait(10.0) == -signal.SIGKILL


def test_nothing_is_left_of_a_forked_coordinator_and_its_own_server() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "coordinator", "chat"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        nodes: list[int] = []

        def all_there() -> bool:
            nodes[:] = children(process.pid)
            return len(nodes) == 2

        assert wait_for(all_there, 60.0)
        below = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (server,) = [int(pid) for pid in below if is_server(int(pid))]
        assert sorted(map(command_of, nodes)) == ["drafter_node", "target_node"]
        process.kill()
        process.wait(10.0)
        assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in nodes), 10.0)
        assert wait_for(lambda: not Path(f"/proc/{server}").exists(), 10.0)
