"""The socket of `status`: it answers this user, within limits, and nothing ends it."""

import contextlib
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import status as asking
from coordinator.cluster import status_socket as module
from coordinator.cluster.status_socket import MAX_ANSWER_BYTES, NAME, REQUEST, StatusSocket
from coordinator.launching.runtime_folder import RuntimeFolder


class Coordinator:
    """One that answers, and counts how often it was asked."""

    def __init__(self) -> None:
        self.folder = RuntimeFolder()
        self.answer: dict[str, Any] = {"pid": os.getpid(), "form": asking.FORM}
        self.num_asked = 0
        self.socket = StatusSocket(self.folder.path, self._ask)
        self.socket.start()

    def _ask(self) -> dict[str, Any]:
        self.num_asked += 1
        return self.answer

    def connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(5.0)
        connection.connect(os.fspath(self.folder.path / NAME))
        return connection

    def said_to(self, request: bytes) -> bytes:
        """What it answers to this; empty: nothing."""
        with self.connected() as connection:
            try:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: connection.recv(1 << 16), b""))
            except OSError:
                return b""


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator()
    yield made
    made.socket.close()
    made.folder.remove()


def test_whoever_asks_is_answered_and_only_this_user_can(coordinator: Coordinator) -> None:
    assert json.loads(coordinator.said_to(REQUEST)) == coordinator.answer
    mode = (coordinator.folder.path / NAME).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert mode & 0o777 == 0o600
    assert (coordinator.folder.path.stat().st_mode & 0o777) == 0o700
    assert asking.ask(coordinator.folder.path) == asking.Found(
        coordinator.folder.path, os.getpid(), coordinator.answer
    )


def test_another_user_is_told_nothing(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(module, "peer_of", lambda _: (1, user + 1))
    assert coordinator.said_to(REQUEST) == b""
    assert coordinator.num_asked == 0


@pytest.mark.parametrize(
    "request_",
    [b"", b"\n", b"status 2\n", b"x" * 100_000, b"\x00\xff\n", b"GET / HTTP/1.1\r\n\r\n"],
    ids=["nothing", "a line end", "a later form", "very much", "no text", "a browser"],
)
def test_what_is_no_request_is_refused_and_ends_nothing(
    coordinator: Coordinator, request_: bytes
) -> None:
    said = coordinator.said_to(request_)
    assert said == b"" or "expected" in json.loads(said)["error"]
    assert coordinator.num_asked == 0
    assert json.loads(coordinator.said_to(REQUEST)) == coordinator.answer


def test_noise_from_many_at_once_ends_nothing(coordinator: Coordinator) -> None:
    def make_noise() -> None:
        for _ in range(20):
            coordinator.said_to(secrets.token_bytes(200))

    threads = [threading.Thread(target=make_noise) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = asking.ask(coordinator.folder.path)
    assert found is not None
    assert found.answer == coordinator.answer


def test_those_who_say_nothing_are_let_go(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.2)
    silent = []
    with contextlib.suppress(BlockingIOError):
        silent += [coordinator.connected() for _ in range(module.MAX_AT_ONCE)]
    found = asking.ask(coordinator.folder.path)
    assert found is not None
    assert found.trouble == ""
    for connection in silent:
        assert connection.recv(1) in (b"", b"{")
        connection.close()


def test_whoever_asks_all_the_time_does_not_disturb(coordinator: Coordinator) -> None:
    started = time.monotonic()
    for _ in range(50):
        coordinator.said_to(REQUEST)
    assert coordinator.num_asked <= 1 + (time.monotonic() - started) / module.FRESH_S


def test_an_answer_that_is_too_long_is_not_sent(coordinator: Coordinator) -> None:
    coordinator.answer = {"much": "x" * MAX_ANSWER_BYTES}
    assert json.loads(coordinator.said_to(REQUEST)) == {"error": "the answer is too long"}
    found = asking.ask(coordinator.folder.path)
    assert found is not None
    assert "too long" in found.trouble


@pytest.mark.parametrize(
    ("said", "trouble"),
    [
        (b"no JSON", "cannot be read"),
        (b"[]", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"pid": 5, "form": 99}', "another release"),
        (b'{"pid": 5, "hung": true}', "its loop hangs"),
        (b'{"pid": 5, "hung": false}', "it is ending"),
    ],
)
def test_an_answer_of_another_form_is_trouble_and_no_traceback(
    said: bytes, trouble: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(asking, "_exchange", lambda *_: (5, said))
    found = asking.ask(tmp_path)
    assert found is not None
    assert trouble in found.trouble


def test_a_coordinator_that_does_not_answer_is_said_to_hang_and_one_that_ended_is_not() -> None:
    folder = RuntimeFolder()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(os.fspath(folder.path / NAME))
        listening.listen(1)
        found = asking.ask(folder.path, limit_s=0.2)
        waiting = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(10):
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                waiting[-1].setblocking(False)
                waiting[-1].connect(os.fspath(folder.path / NAME))
        crowded = asking.ask(folder.path, limit_s=0.2)
        for one in waiting:
            one.close()
    assert crowded is not None
    assert "stopped, or hangs" in crowded.trouble
    assert found is not None
    assert found.pid == os.getpid()
    assert "stopped, or hangs" in found.trouble
    folder.remove()
    assert asking.ask(folder.path, limit_s=0.2) is None
