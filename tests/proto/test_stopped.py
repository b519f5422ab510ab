"""A process that stands still for seconds, as with Ctrl-Z and fg, hears its nodes afterwards."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from proto.links.transport import Connection, Listener

ROOT = Path(__file__).resolve().parents[2]
NUM_LINKS = 16  # one in three was lost for good
STOPPED_S = 8.0
PATIENCE_S = 10.0


def answer_for_ever() -> None:
    """Listen on the addresses that are given, and answer each frame with itself."""
    listeners = [Listener(endpoint) for endpoint in sys.argv[1:]]
    sys.stdout.write("up\n")
    sys.stdout.flush()
    while True:
        for one in listeners:
            for name, frame in one.receive(0.01):
                one.send(name, frame)


@contextmanager
def listening(endpoints: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """A process that does so."""
    code = f"from {__name__} import {answer_for_ever.__name__} as run; run()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *endpoints], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def answered(node: Connection, question: bytes) -> bool:
    """Whether this frame comes back; it is sent again and again, as heartbeats are."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        node.send(question)
        if question in list(node.receive(0.05)):
            return True
    return False


@pytest.mark.process
@pytest.mark.long
def test_whoever_was_stopped_for_longer_than_a_silence_hears_all_its_nodes(tmp_path: Path) -> None:
    endpoints = [f"ipc://{tmp_path}/{number}" for number in range(NUM_LINKS)]
    with listening(endpoints) as stopped, ExitStack() as stack:
        nodes = [stack.enter_context(closing(Connection(one, b"node"))) for one in endpoints]
        assert all(answered(node, b"before") for node in nodes)
        stopped.send_signal(signal.SIGSTOP)
        until = time.monotonic() + STOPPED_S
        while time.monotonic() < until:
            for node in nodes:
                node.send(b"beat")
            time.sleep(0.1)
        stopped.send_signal(signal.SIGCONT)
        assert [answered(node, b"after") for node in nodes] == [True] * NUM_LINKS
