"""NVIDIA's multi-process service for the time of a measurement: a daemon of our own.

Its pipe lies in a folder of ours, so processes that do not ask for it are not touched, and the
compute mode of the GPU stays as it is.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.gpu_kit.steps.versions import MPS_DAEMON
from proto.errors import ConfigurationError

START_S, END_S, ASK_S = 20.0, 10.0, 5.0


@contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of processes that share a GPU; the daemon ends with it.

    Raises ConfigurationError: the daemon does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }
    for name in ("pipe", "log"):
        (folder / name).mkdir(exist_ok=True)
    log = folder / "daemon.txt"
    try:
        with log.open("wb") as file:
            # In the foreground: a child of ours, that can be ended by its id.
            daemon = subprocess.Popen(
                *([MPS_DAEMON, "-f"],),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
    except OSError as error:
        raise ConfigurationError(f"{MPS_DAEMON} does not start: {error.strerror}") from error
    try:
        _wait_for(daemon, environment, log)
        yield environment
    finally:
        _ask("quit", environment)
        _end(daemon)


def _wait_for(daemon: "subprocess.Popen[bytes]", environment: dict[str, str], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if daemon.poll() is not None:
            break
        if _ask("get_server_list", environment):
            return
        time.sleep(0.2)
    lines = log.read_text(errors="replace").strip().splitlines() or ["no reason was given"]
    raise ConfigurationError(f"{MPS_DAEMON} does not start: {lines[-1]}")


def _ask(command: str, environment: dict[str, str]) -> bool:
    """Whether the daemon took a command."""
    try:
        ended = subprocess.run(
            *([MPS_DAEMON],),
            input=f"{command}\n".encode(),
            env=environment,
            capture_output=True,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0


def _end(daemon: "subprocess.Popen[bytes]") -> None:
    ways: list[Callable[[], object]] = [daemon.poll, daemon.terminate, daemon.kill]
    for insist in ways:
        insist()
        try:
            daemon.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
        return
