"""A line: every frame arrives once, whole and in order, or is refused; a wrong one ends it."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.links import line as module
from proto.links.line import AWAKE_S, Line, pair
from proto.links.transport import Connection, Listener
from proto.messages import MAX_FRAME_BYTES

LIMIT_S = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    ours, theirs = pair()
    other = Line(theirs)
    with closing(ours), closing(other):
        yield ours, other


def read(line: Line, count: int) -> list[bytes]:
    """The next frames of a line, which must come."""
    frames: list[bytes] = []
    deadline = time.monotonic() + LIMIT_S
    while len(frames) < count and time.monotonic() < deadline:
        if line.wait(0.1):
            frames += line.read()
    return frames


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=5000), min_size=1, max_size=40))
def test_frames_arrive_once_whole_and_in_order(frames: list[bytes]) -> None:
    ours, theirs = pair()
    with closing(ours), closing(Line(theirs)) as other:
        assert all(ours.send(frame) for frame in frames)
        assert read(other, len(frames)) == frames


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8), st.data())
def test_a_frame_may_come_in_pieces(frames: list[bytes], data: st.DataObject) -> None:
    ours, theirs = pair()
    stream = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    found: list[bytes] = []
    with closing(ours), theirs:
        while stream:
            count = data.draw(st.integers(1, len(stream)))
            theirs.sendall(stream[:count])
            stream = stream[count:]
            assert ours.wait(LIMIT_S)
            found += ours.read()
        assert found == frames


def test_a_frame_that_is_larger_than_the_system_takes_leaves_piece_by_piece(
    ends: tuple[Line, Line],
) -> None:
    ours, other = ends
    large, small = os.urandom(8 << 20), b"small"
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.extend(read(other, 2)))
    assert ours.send(large)
    assert ours.send(small)
    assert ours.has_unsent
    reader.start()
    deadline = time.monotonic() + LIMIT_S
    while ours.has_unsent and time.monotonic() < deadline:
        ours.wait(0.01)
    reader.join()
    assert found == [large, small]


def test_what_nobody_reads_is_refused_in_the_end(
    ends: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 10)
    ours, other = ends
    taken = 0
    while ours.send(b"x" * 10_000):
        taken += 1
        assert taken < 10_000
    assert ours.is_open
    assert not ours.send(b"another")
    frames: list[bytes] = []
    deadline = time.monotonic() + LIMIT_S
    while len(frames) < taken and time.monotonic() < deadline:
        frames += other.read()
        ours.flush()
    assert frames == [b"x" * 10_000] * taken
    assert ours.send(b"another")


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_length_that_no_frame_has_ends_the_line(length: int) -> None:
    ours, theirs = pair()
    with closing(ours), theirs:
        theirs.sendall(struct.pack("<I", 2) + b"ok" + struct.pack("<I", length))
        assert read(ours, 1) == [b"ok"]
        assert not ours.is_open
        assert not ours.send(b"more")


def test_the_other_end_may_close_at_any_moment(ends: tuple[Line, Line]) -> None:
    ours, other = ends
    other.send(b"last")
    other.close()
    assert read(ours, 1) == [b"last"]
    assert ours.wait(LIMIT_S)
    assert not ours.read()
    assert not ours.is_open
    assert not ours.send(b"more")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seconds", [0.0205, AWAKE_S / 2])
def test_a_wait_keeps_its_time_and_ends_when_something_comes(
    exact: bool,  # noqa: FBT001
    seconds: float,
    ends: tuple[Line, Line],
) -> None:
    ours, other = ends
    began = time.monotonic()
    assert not ours.wait(seconds, exact=exact)
    assert seconds <= time.monotonic() - began < 1.0
    other.send(b"frame")
    assert ours.wait(LIMIT_S, exact=exact)
    assert time.monotonic() - began < LIMIT_S


# -- between a coordinator and a node --------------------------------------------------------------


@pytest.fixture
def listener(tmp_path: os.PathLike[str]) -> Iterator[Listener]:
    with closing(Listener(f"ipc://{tmp_path}/socket")) as listening:
        yield listening


def over_line(listener: Listener, busy_s: float = 0.0) -> Connection:
    """A node that was started with a line."""
    ours, theirs = pair()
    number = os.dup(theirs.fileno())
    theirs.close()
    listener.add_line(b"node", ours)
    assert not list(listener.receive(0.0))
    return Connection(listener.endpoint, b"node", line=Line.inherited(number), busy_poll_s=busy_s)


def arrived(listener: Listener, count: int) -> list[tuple[bytes, bytes]]:
    """The next frames that a listener receives, which must come."""
    frames: list[tuple[bytes, bytes]] = []
    deadline = time.monotonic() + LIMIT_S
    while len(frames) < count and time.monotonic() < deadline:
        frames += listener.receive(0.05)
    return frames


@pytest.mark.parametrize("busy_s", [0.0, 0.002])
def test_a_node_and_its_coordinator_talk_over_the_line(listener: Listener, busy_s: float) -> None:
    with closing(over_line(listener, busy_s)) as node:
        assert node.send(b"hello")
        assert arrived(listener, 1) == [(b"node", b"hello")]
        assert listener.send(b"node", b"welcome")
        assert list(node.receive(LIMIT_S)) == [b"welcome"]
        assert not node.has_frames()
        assert listener.send(b"node", b"more")
        assert node.has_frames()
        assert list(node.receive(0.0)) == [b"more"]
        assert list(node.receive(0.01)) == []


def test_what_a_caller_leaves_comes_with_the_next_call(listener: Listener) -> None:
    with closing(over_line(listener)) as node:
        for frame in (b"welcome", b"open", b"another"):
            assert listener.send(b"node", frame)
        assert next(iter(node.receive(LIMIT_S))) == b"welcome"
        assert node.has_frames()
        assert list(node.receive(0.0)) == [b"open", b"another"]
        assert not node.has_frames()


def test_a_wait_that_polls_first_is_no_longer_for_it(listener: Listener) -> None:
    with closing(over_line(listener, busy_s=0.3)) as node:
        began = time.monotonic()
        assert list(node.receive(0.3)) == []
        assert 0.3 <= time.monotonic() - began < 0.55


def test_a_large_frame_for_a_node_leaves_while_the_coordinator_receives(listener: Listener) -> None:
    large = os.urandom(4 << 20)
    with closing(over_line(listener)) as node:
        assert listener.send(b"node", large)
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.extend(_first(node)))
        reader.start()
        while reader.is_alive():
            assert not list(listener.receive(0.01))
        assert found == [large]


def _first(node: Connection) -> list[bytes]:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if frames := list(node.receive(0.1)):
            return frames
    return []


def test_without_its_line_a_node_is_reached_over_zeromq(listener: Listener) -> None:
    ours, theirs = pair()
    listener.add_line(b"node", ours)
    with closing(Connection(listener.endpoint, b"node", line=Line(theirs))) as node:
        node.send(b"one")
        assert arrived(listener, 1) == [(b"node", b"one")]
        theirs.shutdown(socket.SHUT_RDWR)
        assert list(node.receive(0.1)) == []  # it finds the line closed
        assert not list(listener.receive(0.1))
        assert node.send(b"two")
        assert arrived(listener, 1) == [(b"node", b"two")]
        assert listener.send(b"node", b"three")
        assert _first(node) == [b"three"]


def test_a_new_line_takes_the_place_of_an_older_one(listener: Listener) -> None:
    with closing(over_line(listener)) as old, closing(over_line(listener)) as new:
        new.send(b"hello")
        assert arrived(listener, 1) == [(b"node", b"hello")]
        assert listener.send(b"node", b"welcome")
        assert _first(new) == [b"welcome"]
        assert list(old.receive(0.05)) == []
