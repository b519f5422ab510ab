"""Whoever starts a process can end it, and all that it has started, whatever their state."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.launching import launcher as launching
from coordinator.launching.launcher import Launcher, Obituary
from proto.messages import Role
from proto.node_config import NodeConfig

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 20.0
MODULE = "tests.coordinator.launching.stopped_node"
# A coordinator that says which processes there are, and is killed.
COORDINATOR = f"""
import os, signal, sys, time
from coordinator.launching import launcher as launching
from tests.coordinator.launching.test_groups import started
launching.MODULES = dict.fromkeys(launching.MODULES, {MODULE!r})
launcher = launching.Launcher()
print(*started(launcher, sys.argv[1]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def state_of(pid: int) -> str:
    """The letter of a process's state; empty: it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether it does in time."""
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def have_gone(*pids: int) -> bool:
    """Whether all have ended in time."""
    return comes_true(lambda: all(state_of(pid) in ("", "Z") for pid in pids))


def started(launcher: Launcher, how: str) -> tuple[int, int]:
    """A node that has a stopped child, and that child."""
    launcher.start(NodeConfig(Role.TARGET, "ipc:///none", "target-1", "", model=how, device="cpu"))
    (node,) = launcher._nodes
    assert comes_true(lambda: node.last_words().isdigit())
    child = int(node.last_words())
    if how == "stopped":
        assert comes_true(lambda: state_of(node.process.pid) == "T")
    assert comes_true(lambda: state_of(child) == "T")
    return node.process.pid, child


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """One whose nodes have stopped children."""
    monkeypatch.setattr(launching, "MODULES", dict.fromkeys(launching.MODULES, MODULE))
    monkeypatch.setattr(launching, "END_GRACE_S", 0.2)
    starting = Launcher()
    yield starting
    starting.close()


@pytest.mark.parametrize("how", ["ends at once", "busy", "stopped"])
def test_a_node_is_ended_with_all_that_it_has_started(launcher: Launcher, how: str) -> None:
    node, child = started(launcher, how)
    launcher.close()
    assert have_gone(node, child)


def test_what_a_node_leaves_behind_when_it_is_killed_is_ended(launcher: Launcher) -> None:
    node, child = started(launcher, "running")
    os.kill(node, signal.SIGKILL)
    ends: list[Obituary] = []
    assert comes_true(lambda: bool(ends) or bool(ends.extend(launcher.ended())))
    assert [end.status for end in ends] == [-signal.SIGKILL]
    assert have_gone(node, child)


def test_ctrl_c_reaches_the_coordinator_alone(launcher: Launcher) -> None:
    node, child = started(launcher, "running")
    assert os.getpgid(node) == os.getpgid(child) == node != os.getpgid(0)


@pytest.mark.parametrize("how", ["running", "stopped"])
def test_the_kernel_ends_stopped_processes_of_a_coordinator_that_was_killed(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COORDINATOR, how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert have_gone(*map(int, done.stdout.split()))
