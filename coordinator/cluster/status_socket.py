"""The Unix socket at which the command `status` asks a coordinator for its state.

The socket lies in the runtime folder, which no other user can enter, and answers only this user
(SO_PEERCRED). A request is one line, the answer is one JSON object; both are limited in size and in
time. Any other request is answered with an error, or not at all; it cannot end the coordinator.
"""

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

NAME = "status"
REQUEST = b"status 1\n"
MAX_REQUEST_BYTES = 64
MAX_ANSWER_BYTES = 1 << 18
LIMIT_S = 1.0  # longest time to read a request, and again to send its answer
MAX_AT_ONCE = 8
FRESH_S = 0.1  # an answer is used again for requests within this time
PAUSE_S = 0.05

_CREDENTIALS = struct.Struct("3i")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end of a Unix socket. Raises OSError."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


class StatusSocket:
    """Answers requests in its own threads. `ask` returns the state and may take some seconds."""

    def __init__(self, folder: Path, ask: Callable[[], dict[str, Any]]) -> None:
        self._ask = ask
        self._path = folder / NAME
        self._listening: socket.socket | None = None
        self._places = threading.BoundedSemaphore(MAX_AT_ONCE)
        self._asking = threading.Lock()
        self._latest: bytes = b""
        self._asked_at = float("-inf")
        self._is_closed = False

    def start(self) -> None:
        """Begin to answer. If that cannot be done, log a warning and go on without."""
        try:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listening.bind(os.fspath(self._path))
                self._path.chmod(0o600)
                listening.listen(MAX_AT_ONCE)
                self._listening = listening
                threading.Thread(target=self._run, name="status", daemon=True).start()
            except (OSError, RuntimeError):
                self._listening = None
                listening.close()
                raise
        except (OSError, RuntimeError) as error:
            logger.warning("`status` cannot ask this coordinator: %s", error)

    def close(self) -> None:
        """Stop answering. May be called twice."""
        self._is_closed = True
        if self._listening is not None:
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # ends the waiting `accept`
            self._listening.close()

    def _run(self) -> None:
        assert self._listening is not None
        while not self._is_closed:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                time.sleep(PAUSE_S)  # the socket was closed, or no file descriptor is left
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            answering = threading.Thread(
                target=self._serve, args=(connection,), name="answer", daemon=True
            )
            try:
                answering.start()
            except RuntimeError:  # there is no room for one more thread
                self._places.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(LIMIT_S)
                if peer_of(connection)[1] == os.geteuid():
                    is_known = _request(connection) == REQUEST
                    connection.settimeout(LIMIT_S)
                    connection.sendall(self._answer() if is_known else _refusal())
        finally:
            self._places.release()

    def _answer(self) -> bytes:
        with self._asking:
            if time.monotonic() - self._asked_at > FRESH_S:
                answer = json.dumps(self._ask()).encode()
                too_long = {"error": "the answer is too long"}
                fits = len(answer) < MAX_ANSWER_BYTES
                self._latest = answer if fits else json.dumps(too_long).encode()
                self._asked_at = time.monotonic()
            return self._latest


def _request(connection: socket.socket) -> bytes:
    """Return the first line that comes in time, or the part of it that came. Raises OSError."""
    deadline, read = time.monotonic() + LIMIT_S, b""
    while b"\n" not in read and len(read) < MAX_REQUEST_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (more := connection.recv(MAX_REQUEST_BYTES - len(read))):
            break
        read += more
    return read


def _refusal() -> bytes:
    return json.dumps({"error": f"expected {REQUEST.decode().strip()!r}"}).encode()
