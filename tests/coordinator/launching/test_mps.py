"""The service for two processes on one GPU; a script stands for NVIDIA's program."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import coordinator.launching.launcher
from coordinator.launching import launcher as mps
from coordinator.launching.launcher import CONTROL, DRAFTER, PIPE, Launcher, Mps
from proto.messages import Role
from proto.node_config import NodeConfig

# -f: serve until somebody says quit; else pass on what standard input says.
DAEMON = """#!/bin/sh
if [ "$1" = -f ]; then
  echo $$ > "$CUDA_MPS_PIPE_DIRECTORY/pid"
  : > "$CUDA_MPS_PIPE_DIRECTORY/control"
  while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/quit" ]; do sleep 0.05; done
else
  read -r said && echo "$said" > "$CUDA_MPS_PIPE_DIRECTORY/quit"
fi
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the program in it, on the path."""
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(DAEMON)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPE, raising=False)
    return program


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pid: int) -> bool:
    deadline = time.monotonic() + 5.0
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def test_it_runs_until_it_is_stopped_and_favours_the_target(
    installed: Path, tmp_path: Path
) -> None:
    service = Mps.start(tmp_path)
    assert service is not None
    pid = int((tmp_path / "mps" / "pid").read_text())
    assert is_alive(pid)
    assert service.environment(Role.TARGET) == {PIPE: str(tmp_path / "mps")}
    assert service.environment(Role.DRAFTER) == {PIPE: str(tmp_path / "mps"), **DRAFTER}
    service.stop()
    assert not is_alive(pid)
    assert (tmp_path / "mps" / "quit").read_text() == "quit -t 1\n"
    service.stop()


def test_it_ends_with_a_coordinator_that_is_killed(installed: Path, tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from coordinator.launching.launcher import Mps
assert Mps.start(Path({str(tmp_path)!r})) is not None
print("up", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        pid = int((tmp_path / "mps" / "pid").read_text())
        owner.send_signal(signal.SIGKILL)
    assert wait_for_end(pid)


def test_where_it_cannot_be_had_there_is_none(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setattr(mps, "START_LIMIT_S", 0.3)
    assert Mps.start(tmp_path) is None
    installed.unlink()
    assert Mps.start(tmp_path) is None


def test_one_of_the_users_own_is_used_and_left_alone(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PIPE, "/run/theirs")
    service = Mps.start(tmp_path)
    assert service is not None
    assert service.environment(Role.TARGET) == {PIPE: "/run/theirs"}
    service.stop()
    monkeypatch.setenv(PIPE, "")
    assert Mps.start(tmp_path) is None
    assert not (tmp_path / "mps").exists()


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_launcher_has_one_where_the_only_gpu_is_shared(
    num_gpus: int, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.launching.devices._num_gpus", lambda: num_gpus)
    started: list[dict[str, str]] = []

    class Process:
        stdin = None
        pid = 1

        def __init__(self, *_: object, env: dict[str, str], **__: object) -> None:
            started.append(env)
            raise OSError("no process is started here")

    launcher = Launcher()
    real = subprocess.Popen

    def popen(command: list[str], **options: object) -> object:
        if command[0] == "/bin/sh":
            return real(command, **options)  # type: ignore[call-overload]
        return Process(command, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(coordinator.launching.launcher.subprocess, "Popen", popen)
    try:
        for role in Role:
            config = NodeConfig(role, launcher.endpoint, str(role), "secret", "model", device="")
            with pytest.raises(Exception, match="no process is started here"):
                launcher.start(config)
    finally:
        launcher.close()
    by_role = dict(zip(Role, started, strict=True))
    is_shared = num_gpus == 1
    assert all((PIPE in env) is is_shared for env in started)
    assert (set(DRAFTER) <= set(by_role[Role.DRAFTER])) is is_shared
    assert not set(DRAFTER) & set(by_role[Role.TARGET])
