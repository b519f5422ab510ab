"""The service for two processes on one GPU; a script stands for NVIDIA's program."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator.launching import devices, mps
from coordinator.launching.launcher import Launcher
from coordinator.launching.mps import CONTROL, DRAFTER, PIPE, VISIBLE, Mps
from proto.messages import Role
from proto.node_config import NodeConfig

# -f: serve until somebody says quit; else pass on what standard input says.
DAEMON = """#!/bin/sh
if [ "$1" = -f ]; then
  echo $$ > "$CUDA_MPS_PIPE_DIRECTORY/pid"
  echo "${CUDA_VISIBLE_DEVICES-all}" > "$CUDA_MPS_PIPE_DIRECTORY/visible"
  : > "$CUDA_MPS_PIPE_DIRECTORY/control"
  while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/quit" ]; do sleep 0.05; done
else
  read -r said && echo "$said" > "$CUDA_MPS_PIPE_DIRECTORY/quit"
fi
"""

# In place of the one that asks the driver for memory: it says what it was given.
CLIENT = """
import os, pathlib, sys
pipe = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if pipe.exists():
    said = os.environ.get("CUDA_VISIBLE_DEVICES", "all"), sys.argv[1]
    (pipe / "client").write_text(" ".join(said))
"""
CARDS = ("GPU-aa", "GPU-bb")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the program in it, on the path."""
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(DAEMON)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPE, raising=False)
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(mps, "_CLIENT", CLIENT)
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
    service = Mps.start(tmp_path, CARDS, 0)
    assert service is not None
    pid = int((tmp_path / "mps" / "pid").read_text())
    assert is_alive(pid)
    of_both = {PIPE: str(tmp_path / "mps"), VISIBLE: "GPU-aa,GPU-bb"}
    assert service.environment(Role.TARGET) == of_both
    assert service.environment(Role.DRAFTER) == {**of_both, **DRAFTER}
    service.stop()
    assert not is_alive(pid)
    assert (tmp_path / "mps" / "quit").read_text() == "quit -t 1\n"
    service.stop()


def test_it_ends_with_a_coordinator_that_is_killed(installed: Path, tmp_path: Path) -> None:
    code = f"""
CARDS = ["GPU-aa"]
import time
from pathlib import Path
from coordinator.launching import mps
mps._CLIENT = ""
assert mps.Mps.start(Path({str(tmp_path)!r}), CARDS, 0) is not None
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
    assert Mps.start(tmp_path, CARDS, 0) is None
    installed.unlink()
    assert Mps.start(tmp_path, CARDS, 0) is None


def test_one_of_the_users_own_is_used_and_left_alone(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PIPE, "/run/theirs")
    service = Mps.start(tmp_path, CARDS, 0)
    assert service is not None
    assert service.environment(Role.TARGET) == {PIPE: "/run/theirs"}
    service.stop()
    monkeypatch.setenv(PIPE, "")
    assert Mps.start(tmp_path, CARDS, 0) is None
    assert not (tmp_path / "mps").exists()


@pytest.mark.parametrize(
    ("cards", "of_daemon", "of_client"),
    [
        (("GPU-aa", "GPU-bb"), "GPU-aa,GPU-bb", "GPU-aa,GPU-bb"),
        (("MIG-aa",), "MIG-aa", "MIG-aa"),
        (("1",), "all", "1"),
    ],
)
def test_the_daemon_and_its_clients_do_not_both_count(
    cards: tuple[str, ...],
    of_daemon: str,
    of_client: str,
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VISIBLE, "1")
    service = Mps.start(tmp_path, cards, 0)
    assert service is not None
    assert (tmp_path / "mps" / "visible").read_text() == f"{of_daemon}\n"
    assert (tmp_path / "mps" / "client").read_text() == f"{of_client} 0"
    service.stop()


@pytest.mark.parametrize(
    ("client", "why"),
    [
        ("import sys; sys.exit('cuInit fails with status 805')", "cuInit fails with status 805"),
        ("import time; time.sleep(60)", "it answers no client in 1 s"),
    ],
)
def test_one_that_serves_no_client_is_ended_and_one_line_says_why(
    client: str,
    why: str,
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mps, "_CLIENT", client)
    monkeypatch.setattr(mps, "CLIENT_LIMIT_S", 1.0)
    assert Mps.start(tmp_path, CARDS, 0) is None
    assert wait_for_end(int((tmp_path / "mps" / "pid").read_text()))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("both nodes share a GPU in turns: without MPS (")
    assert why in line


def test_the_client_that_ships_says_where_there_is_no_driver() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", mps._CLIENT, "0"], capture_output=True)
    assert done.returncode in (0, 1)
    assert done.returncode == 0 or b"libcuda" in done.stderr or b"fails with" in done.stderr


def environments(**named: str | None) -> dict[Role, dict[str, str]]:
    """What the processes of two nodes would find in their environments, by role.

    named  their devices; None: that node is not there
    """
    launcher = Launcher()
    devices_of = {role: named.get(str(role), "") for role in Role}
    found = {}
    try:
        for role, peer in zip(Role, reversed(Role), strict=True):
            if (device := devices_of[role]) is None:
                continue
            config = NodeConfig(
                *(role, launcher.endpoint, str(role), "secret", "model"),
                device=device,
                peer_device=devices_of[peer],
            )
            completed = launcher._completed(config)
            launcher._share_gpu(completed)
            found[role] = launcher._environment(completed)
    finally:
        launcher.close()
    return found


@pytest.mark.parametrize(
    ("num_gpus", "named", "is_shared"),
    [
        (1, {}, True),
        (2, {}, False),
        (2, {"target": "cuda:1", "drafter": "cuda:1"}, True),
        (2, {"target": "cuda:0-1", "drafter": "cuda:1"}, True),
        (2, {"target": "cuda:0", "drafter": "cpu"}, False),
        (1, {"target": "cpu"}, False),  # the drafter has the only GPU for itself
        (1, {"drafter": None}, False),
    ],
)
def test_a_launcher_has_one_where_two_nodes_share_a_gpu(
    num_gpus: int,
    named: dict[str, str | None],
    is_shared: object,
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "_num_gpus", lambda: num_gpus)
    found = environments(**named)
    assert all((PIPE in environment) is is_shared for environment in found.values())
    assert not set(DRAFTER) & set(found[Role.TARGET])
    if Role.DRAFTER in found:
        assert (set(DRAFTER) <= set(found[Role.DRAFTER])) is is_shared


def test_nodes_leave_a_service_of_the_users_own_that_serves_no_client(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_num_gpus", lambda: 1)
    monkeypatch.setenv(PIPE, str(tmp_path))
    assert all(one[PIPE] == str(tmp_path) for one in environments().values())
    monkeypatch.setattr(mps, "_CLIENT", "raise SystemExit('no')")
    assert not any(PIPE in one for one in environments().values())
