"""Frames over real sockets: ipc in a temporary folder, tcp on loopback."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proto.errors import ConfigurationError, TransportError
from proto.links.transport import (
    MAX_IPC_PATH_BYTES,
    NODE_FRAMES_AT_ONCE,
    Connection,
    Listener,
    check_endpoint,
)
from proto.messages import MAX_FRAME_BYTES

PATIENCE_S = 5.0
BUSY_S = 0.1


@pytest.fixture(params=["ipc", "tcp", "busy"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    """A listening coordinator, the third one without sleep."""
    endpoint = "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/socket"
    listening = Listener(endpoint, busy_poll_s=BUSY_S if request.param == "busy" else 0.0)
    yield listening
    listening.close()


@pytest.fixture
def connection(listener: Listener) -> Iterator[Connection]:
    """A node whose first frame has reached the coordinator."""
    connected = Connection(listener.endpoint, b"node")
    introduce(listener, connected, b"node")
    yield connected
    connected.close()


def introduce(listener: Listener, connected: Connection, name: bytes) -> None:
    """Send a first frame once the link is there, and wait until it has come."""
    deadline = time.monotonic() + PATIENCE_S
    while not connected.send(b"hello"):
        assert time.monotonic() < deadline, "the link is not there"
        time.sleep(0.01)
    while not (frames := list(listener.receive(0.1))):
        assert time.monotonic() < deadline, "nothing came"
    assert frames == [(name, b"hello")]


def test_frames_go_both_ways_in_order(listener: Listener, connection: Connection) -> None:
    for number in range(100):
        assert listener.send(b"node", b"%d" % number)
    received: list[bytes] = []
    while len(received) < 100:
        received += connection.receive(PATIENCE_S)
    assert received == [b"%d" % number for number in range(100)]
    assert connection.send(b"back")
    assert list(listener.receive(PATIENCE_S)) == [(b"node", b"back")]


def test_a_peer_that_sends_without_end_does_not_keep_a_node_from_its_work(
    listener: Listener, connection: Connection
) -> None:
    for number in range(2 * NODE_FRAMES_AT_ONCE + 1):
        assert listener.send(b"node", b"%d" % number)
    time.sleep(BUSY_S)  # until all have arrived
    received: list[bytes] = []
    while len(received) < 2 * NODE_FRAMES_AT_ONCE + 1:
        here = list(connection.receive(PATIENCE_S))
        assert 0 < len(here) <= NODE_FRAMES_AT_ONCE
        received += here
    assert received == [b"%d" % number for number in range(2 * NODE_FRAMES_AT_ONCE + 1)]


def test_a_busy_node_hears_at_once_and_falls_asleep_in_the_end(listener: Listener) -> None:
    connection = Connection(listener.endpoint, b"busy", busy_poll_s=BUSY_S)
    introduce(listener, connection, b"busy")
    # Later than it asks without pause: what wakes it then is the socket.
    threading.Timer(3 * BUSY_S, listener.send, (b"busy", b"late")).start()
    before = time.thread_time()
    assert list(connection.receive(PATIENCE_S)) == [b"late"]
    assert time.thread_time() - before < 2 * BUSY_S
    started = time.monotonic()
    assert list(connection.receive(2 * BUSY_S)) == []
    assert time.monotonic() - started < 3 * BUSY_S
    assert listener.send(b"busy", b"soon")
    assert list(connection.receive(PATIENCE_S)) == [b"soon"]
    connection.close()


def test_a_frame_of_the_greatest_length_arrives(listener: Listener, connection: Connection) -> None:
    assert listener.send(b"node", bytes(MAX_FRAME_BYTES))
    assert [len(frame) for frame in connection.receive(PATIENCE_S)] == [MAX_FRAME_BYTES]


def test_a_frame_to_an_unknown_peer_is_refused(listener: Listener) -> None:
    assert not listener.send(b"nobody", b"frame")


def test_a_peer_that_has_gone_is_refused(listener: Listener) -> None:
    connection = Connection(listener.endpoint, b"guest")
    introduce(listener, connection, b"guest")
    connection.close()
    deadline = time.monotonic() + PATIENCE_S
    while listener.send(b"guest", b"frame"):
        assert time.monotonic() < deadline, "frames to a closed endpoint are taken"
        time.sleep(0.01)


def test_waiting_ends_at_the_timeout(listener: Listener, connection: Connection) -> None:
    started = time.monotonic()
    assert list(listener.receive(0.05)) == []
    assert list(connection.receive(0.05)) == []
    assert 0.1 <= time.monotonic() - started < PATIENCE_S


def test_a_node_may_look_without_waiting(connection: Connection) -> None:
    assert list(connection.receive(0.0)) == []


def test_wake_ends_a_wait_from_another_thread(listener: Listener) -> None:
    threading.Timer(0.05, listener.wake).start()
    started = time.monotonic()
    assert list(listener.receive(60.0)) == []
    assert time.monotonic() - started < PATIENCE_S


def test_many_wakes_are_one(listener: Listener) -> None:
    for _ in range(100_000):
        listener.wake()  # never blocks, however full the pipe is
    assert list(listener.receive(PATIENCE_S)) == []
    deadline = time.monotonic() + PATIENCE_S
    while True:  # what is left of them drains quickly
        started = time.monotonic()
        assert list(listener.receive(0.05)) == []
        if time.monotonic() - started >= 0.05:
            break
        assert started < deadline


def test_an_occupied_port_is_one_line_that_says_so() -> None:
    first = Listener("tcp://127.0.0.1:*")
    with pytest.raises(TransportError, match="is another coordinator running there") as caught:
        Listener(first.endpoint)
    assert "\n" not in str(caught.value)
    first.close()


def test_a_folder_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="cannot listen on") as caught:
        Listener(f"ipc://{tmp_path}/missing/socket")
    assert "\n" not in str(caught.value)


def test_a_port_is_free_again_once_the_listener_is_closed() -> None:
    first = Listener("tcp://127.0.0.1:*")
    endpoint = first.endpoint
    first.close()
    second = Listener(endpoint)
    assert second.endpoint == endpoint
    second.close()


def test_a_closed_endpoint_takes_no_frames(listener: Listener) -> None:
    connection = Connection(listener.endpoint, b"node")
    connection.close()
    assert not connection.send(b"frame")


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:5000",
        "tcp://*:5000",
        "tcp://192.168.1.1:5000",
        "tcp://example.org:5000",
        "tcp://127.0.0.1.example.org:5000",
        "tcp://localhost.example.org:5000",
        "tcp://[::]:5000",
        "tcp://127.0.0.1",
        "udp://127.0.0.1:5000",
        "inproc://here",
        "/tmp/socket",
        "",
    ],
)
def test_an_endpoint_that_others_could_reach_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError):
        check_endpoint(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5000", "tcp://127.0.0.1:*", "tcp://localhost:1", "tcp://[::1]:9"]
)
def test_loopback_is_allowed(endpoint: str) -> None:
    check_endpoint(endpoint)
    assert endpoint.startswith("tcp://")


def test_a_socket_path_has_at_most_107_bytes() -> None:
    fits = "ipc:///" + "a" * (MAX_IPC_PATH_BYTES - 1)
    check_endpoint(fits)
    with pytest.raises(ConfigurationError, match="set TMPDIR to a shorter folder"):
        check_endpoint(fits + "a")
    with pytest.raises(ConfigurationError):
        check_endpoint("ipc:///" + "é" * (MAX_IPC_PATH_BYTES // 2 + 1))
    with pytest.raises(ConfigurationError):
        Connection(fits + "a", b"node")
    with pytest.raises(ConfigurationError):
        Listener(fits + "a")
