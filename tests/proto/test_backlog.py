"""What connections have sent and nobody has read, bounded for all of them together."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from proto.links import gate as backlog
from proto.links.gate import Backlog

LIMIT_BYTES = 100_000
PATIENCE_S = 5.0


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection over TCP: of a peer, and of the library."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname())
        return peer, server.accept()[0]


@pytest.fixture(name="ends")
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection."""
    peer, taken = pair()
    with closing(peer), closing(taken):
        yield peer, taken


def is_shut_down(taken: socket.socket) -> bool:
    """Whether it reads an end although the peer has not closed it."""
    taken.setblocking(False)
    try:
        while taken.recv(1 << 20):
            pass
    except BlockingIOError:
        return False
    return True


def fill(peer: socket.socket, num_bytes: int) -> None:
    """Send so much, and wait until the system has it."""
    peer.sendall(bytes(num_bytes))
    time.sleep(0.05)


def test_whoever_has_most_is_cut_off_where_all_have_too_much(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    peer, taken = ends
    other, others = pair()
    with closing(other), closing(others):
        watched = Backlog(LIMIT_BYTES)
        for one in (taken, others):
            watched.opened(one.fileno())
        fill(peer, LIMIT_BYTES)
        fill(other, LIMIT_BYTES // 2)
        watched.limit()
        assert is_shut_down(taken)
        assert not is_shut_down(others)


def test_what_has_come_out_is_not_held_against_a_connection(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    peer, taken = ends
    watched = Backlog(LIMIT_BYTES)
    watched.opened(taken.fileno())
    fill(peer, LIMIT_BYTES + 1)
    watched.came(taken.fileno(), LIMIT_BYTES, 1)
    watched.limit()
    assert not is_shut_down(taken)


def test_a_connection_that_is_closed_while_one_looks_is_no_failure(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, taken = ends
    watched = Backlog(LIMIT_BYTES)
    watched.opened(taken.fileno())
    fill(peer, LIMIT_BYTES + 1)
    inode = os.fstat(taken.fileno()).st_ino
    # The library closes it in a thread of its own, between any two of our calls.
    monkeypatch.setattr(backlog, "_inode", lambda _: inode)
    taken.close()
    watched.limit()
    assert os.fstat(peer.fileno()).st_ino != inode


def test_a_connection_that_has_the_number_of_a_closed_one_is_left_alone(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    peer, taken = ends
    watched = Backlog(LIMIT_BYTES)
    watched.opened(taken.fileno())
    fill(peer, LIMIT_BYTES + 1)
    other, others = pair()
    with closing(other), closing(others):
        os.dup2(others.fileno(), taken.fileno())
        fill(other, LIMIT_BYTES + 1)
        watched.limit()
        assert not is_shut_down(others)
