"""Slow links over real sockets."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from coordinator.cluster.link import Link, Links
from coordinator.cluster.simulated_network import SimulatedNetwork, may_be_lost, spares
from proto.codec import encode
from proto.links.transport import Connection, Listener
from proto.messages import Close, TracePart, Welcome

PATIENCE_S = 5.0
DELAY_S = 0.02
SLACK_S = 0.1  # of a machine that has other things to do


@pytest.fixture
def network(tmp_path: Path) -> Iterator[SimulatedNetwork]:
    """One that loses whatever begins with a small letter."""
    listener = Listener(f"ipc://{tmp_path}/socket")
    found = SimulatedNetwork(listener, seed=1, may_be_lost=bytes.islower)
    yield found
    found.close()


def connect(network: SimulatedNetwork, name: bytes, *, is_answered: bool = True) -> Connection:
    """A node whose first frame has reached the coordinator."""
    connection = Connection(network.endpoint, name, is_answered=is_answered)
    connection.send(b"HELLO")
    assert wait_for(network) == [(name, b"HELLO")]
    return connection


def wait_for(network: SimulatedNetwork, count: int = 1) -> list[tuple[bytes, bytes]]:
    """So many frames."""
    found: list[tuple[bytes, bytes]] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} frames have come"
        found += network.receive(0.05)
    return found


def test_a_frame_takes_the_delay_in_each_direction(network: SimulatedNetwork) -> None:
    network.slow_down(b"far", Links(Link(DELAY_S), Link(DELAY_S)))
    far = connect(network, b"far")
    took: list[float] = []
    for _ in range(9):
        started = time.perf_counter()
        far.send(b"PING")
        assert wait_for(network) == [(b"far", b"PING")]
        took.append(time.perf_counter() - started)
    assert min(took) >= DELAY_S
    assert median(took) < DELAY_S + SLACK_S
    started = time.perf_counter()
    assert network.send(b"far", b"PONG")
    while not (answer := list(far.receive(0.0))):
        list(network.receive(0.001))
    assert answer == [b"PONG"]
    assert DELAY_S <= time.perf_counter() - started < DELAY_S + SLACK_S
    far.close()


def test_one_direction_may_be_slow_alone(network: SimulatedNetwork) -> None:
    network.slow_down(b"far", Links(to_node=Link(bytes_per_s=1e4)))
    far = connect(network, b"far")
    started = time.perf_counter()
    for frame in (b"A" * 500, b"B" * 500):  # 50 ms each
        assert network.send(b"far", frame)
    answers: list[bytes] = []
    while len(answers) < 2 and time.perf_counter() - started < PATIENCE_S:
        answers += far.receive(0.0)
        list(network.receive(0.001))
    assert [answer[:1] for answer in answers] == [b"A", b"B"]
    assert time.perf_counter() - started >= 0.1
    far.close()


def test_another_node_is_as_near_as_ever_and_heartbeats_are_of_their_node(
    network: SimulatedNetwork,
) -> None:
    near, far = (connect(network, name) for name in (b"near", b"far"))
    beats = connect(network, b"far", is_answered=False)
    network.slow_down(b"far", Links(Link(1.0), Link(1.0)))
    started = time.perf_counter()
    beats.send(b"BEAT")
    far.send(b"FAR")
    near.send(b"NEAR")
    assert wait_for(network) == [(b"near", b"NEAR")]
    assert time.perf_counter() - started < 1.0
    assert {frame for _, frame in wait_for(network, 2)} == {b"BEAT", b"FAR"}
    assert time.perf_counter() - started >= 1.0
    for connection in (near, far, beats):
        connection.close()


def test_a_wait_ends_at_its_timeout_and_when_it_is_woken(network: SimulatedNetwork) -> None:
    far = connect(network, b"far")
    network.slow_down(b"far", Links(Link(60.0), Link(60.0)))
    far.send(b"FAR")
    started = time.perf_counter()
    while time.perf_counter() - started < 0.0504:
        assert list(network.receive(0.0504)) == []
    threading.Timer(0.02, network.wake).start()
    assert list(network.receive(30.0)) == []
    assert time.perf_counter() - started < 20.0
    far.close()


def test_a_wait_costs_no_core(network: SimulatedNetwork) -> None:
    network.slow_down(b"far", Links(Link(0.0096), Link(0.0096)))
    far = connect(network, b"far")
    before = time.thread_time()
    started = time.perf_counter()
    for _ in range(20):
        far.send(b"PING")
        wait_for(network)
    assert time.thread_time() - before < 0.35 * (time.perf_counter() - started)
    far.close()


def test_it_loses_what_may_be_lost_and_keeps_the_order_of_the_rest(
    network: SimulatedNetwork,
) -> None:
    network.slow_down(b"far", Links(Link(0.002, 0.002, 0.5), Link(0.002, 0.002, 0.5)))
    far = connect(network, b"far")
    for number in range(100):
        far.send(b"%d" % number)  # neither small nor capital
        far.send(b"small")
    far.send(b"LAST")
    frames: list[bytes] = []
    while b"LAST" not in frames:
        frames += [frame for _, frame in wait_for(network)]
    assert [frame for frame in frames if frame.isdigit()] == [b"%d" % n for n in range(100)]
    assert 25 < frames.count(b"small") < 75
    far.close()


def test_what_is_spared_neither_waits_nor_is_lost(tmp_path: Path) -> None:
    listener = Listener(f"ipc://{tmp_path}/socket")
    network = SimulatedNetwork(
        listener, seed=1, may_be_lost=bytes.islower, spares=lambda frame: frame.startswith(b"#")
    )
    far = connect(network, b"far")
    slow = Link(delay_s=0.5, loss=0.5, bytes_per_s=1000.0)
    network.slow_down(b"far", Links(slow, slow))
    started = time.perf_counter()
    for _ in range(20):
        far.send(b"#" + bytes(1000))
    assert len(wait_for(network, 20)) == 20
    assert time.perf_counter() - started < 0.5
    network.close()


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (encode(Close(1, "stop")), (True, False)),
        (encode(Welcome(9, 0)), (False, False)),
        (encode(TracePart(1, 0, b"")), (True, True)),
        (b"\xff", (True, False)),
    ],
)
def test_only_the_handshake_and_what_is_measured_get_through_any_link(
    frame: bytes, expected: tuple[bool, bool]
) -> None:
    assert (may_be_lost(frame), spares(frame)) == expected
