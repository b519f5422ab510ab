"""Links between hosts: encrypted, and only for those whose keys are known."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from zmq.utils import z85

from node.process import shake_hands
from proto.codec import decode
from proto.errors import ConfigurationError
from proto.links.keys import CoordinatorKeys, KeyPair, NodeKeys
from proto.links.transport import UNFINISHED_HANDSHAKES, Connection, Listener
from proto.messages import (
    PROTOCOL_VERSION,
    Fault,
    FaultCode,
    Fingerprint,
    Hello,
    Role,
)
from tests.hostile.curve import Client, Door, Pair, metadata

PATIENCE_S = 5.0
QUIET_S = 0.3
COORDINATOR, NODE = KeyPair.new(), KeyPair.new()
HELLO: Any = (9, 9, "model", "float32", "cpu", 1, 1, 1)
KEYS = CoordinatorKeys(COORDINATOR, {b"node": NODE.public})
NODE_KEYS = NodeKeys(NODE, COORDINATOR.public)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    """Listens on this host, and for others."""
    listening = Listener(f"ipc://{tmp_path}/socket", outside="tcp://127.0.0.1:*", keys=KEYS)
    yield listening
    listening.close()


def arrived(listener: Listener, limit_s: float = PATIENCE_S) -> list[tuple[bytes, bytes]]:
    """The first frames that come."""
    deadline = time.monotonic() + limit_s
    while (left_s := deadline - time.monotonic()) > 0:
        if frames := list(listener.receive(left_s)):
            return frames
    return []


def say(node: Connection, frame: bytes) -> bool:
    """Send, once the link is there; False: it is not in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not node.send(frame):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def refused(listener: Listener, number: int) -> int:
    """How many were refused, once it is so many."""
    deadline = time.monotonic() + 2 * PATIENCE_S
    while listener.num_refused < number and time.monotonic() < deadline:
        assert arrived(listener, 0.02) == []
    return listener.num_refused


def address(listener: Listener) -> tuple[str, int]:
    """Where the outside is, for a bare socket."""
    host, _, port = listener.outside.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def test_nodes_of_both_sides_are_heard_and_answered(listener: Listener) -> None:
    with (
        closing(Connection(listener.endpoint, b"near")) as near,
        closing(Connection(listener.outside, b"node", keys=NODE_KEYS)) as far,
    ):
        for name, node in ((b"near", near), (b"node", far)):
            assert say(node, b"hello")
            assert arrived(listener) == [(name, b"hello")]
            assert listener.send(name, b"welcome")
            assert list(node.receive(PATIENCE_S)) == [b"welcome"]
    assert listener.num_refused == 0


def test_a_heartbeat_of_a_node_has_its_key(listener: Listener) -> None:
    with (
        closing(Connection(listener.outside, b"node", keys=NODE_KEYS)) as node,
        closing(Connection(listener.outside, b"node", keys=NODE_KEYS, is_answered=False)) as heart,
    ):
        assert say(node, b"hello")
        assert arrived(listener) == [(b"node", b"hello")]
        assert say(heart, b"beat")
        assert arrived(listener) == [(b"node", b"beat")]
        assert listener.send(b"node", b"answer")
        assert list(node.receive(PATIENCE_S)) == [b"answer"]
        assert list(heart.receive(0.0)) == []


def test_one_node_cannot_speak_for_another(listener: Listener) -> None:
    other = KeyPair.new()
    KEYS.nodes[b"other"] = other.public
    with closing(Connection(listener.outside, b"node", keys=replace(NODE_KEYS, own=other))) as liar:
        assert say(liar, b"hello")
        assert arrived(listener, QUIET_S) == []
    with closing(
        Connection(listener.outside, b"other", keys=replace(NODE_KEYS, own=other))
    ) as honest:
        assert say(honest, b"hello")
        assert arrived(listener) == [(b"other", b"hello")]


@pytest.mark.parametrize(
    "keys",
    [
        None,  # none at all
        NodeKeys(KeyPair.new(), COORDINATOR.public),  # the coordinator's, and none that it knows
        NodeKeys(NODE, KeyPair.new().public),  # meant for another coordinator
    ],
)
def test_who_has_no_key_is_refused_and_counted(listener: Listener, keys: NodeKeys | None) -> None:
    with (
        closing(Connection(listener.outside, b"node", keys=keys)) as stranger,
        closing(Connection(listener.outside, b"node", keys=NODE_KEYS)) as node,
    ):
        stranger.send(b"secret")
        assert say(node, b"hello")
        assert arrived(listener) == [(b"node", b"hello")]
        assert refused(listener, 1) >= 1


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_node_with_a_known_key_that_goes_in_silence_is_not_counted_as_refused(
    listener: Listener, *, is_answered: bool
) -> None:
    for _ in range(3):
        with closing(
            Connection(listener.outside, b"node", keys=NODE_KEYS, is_answered=is_answered)
        ):
            assert arrived(listener, QUIET_S) == []
    with closing(Connection(listener.outside, b"node", keys=NODE_KEYS)) as open_still:
        assert arrived(listener, QUIET_S) == []
        for number in (1, 2):
            with socket.create_connection(address(listener)) as one:
                one.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
                time.sleep(QUIET_S)
            assert arrived(listener, QUIET_S) == []
            assert listener.num_refused <= number
        assert say(open_still, b"hello")
        assert arrived(listener) == [(b"node", b"hello")]
    assert refused(listener, 2) == 2


def test_a_node_that_has_gone_before_its_word_was_read_is_not_counted_as_refused(
    listener: Listener,
) -> None:
    for _ in range(3):
        with closing(Connection(listener.outside, b"node", keys=NODE_KEYS)) as node:
            assert say(node, b"hello")
            time.sleep(QUIET_S)
        time.sleep(QUIET_S)
        assert listener.num_refused == 0
        assert arrived(listener) == [(b"node", b"hello")]
    with socket.create_connection(address(listener)) as one:
        one.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        assert refused(listener, 1) == 1


def test_a_known_key_under_the_name_of_another_node_is_told_of_as_that(listener: Listener) -> None:
    other = KeyPair.new()
    KEYS.nodes[b"other"] = other.public
    with closing(Connection(listener.outside, b"node", keys=replace(NODE_KEYS, own=other))) as liar:
        assert say(liar, b"hello")
        assert arrived(listener, QUIET_S) == []
    time.sleep(QUIET_S)
    assert arrived(listener, QUIET_S) == []
    assert listener.misnamed() == ["a node with the key of other called itself node"]
    assert listener.misnamed() == []
    assert listener.num_refused == 0


def test_garbage_is_refused_and_counted(listener: Listener) -> None:
    with socket.create_connection(address(listener)) as one:
        one.sendall(b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n" + bytes(range(256)) * 100)
        assert refused(listener, 1) == 1


def test_a_frame_before_the_handshake_is_not_taken_whatever_its_length(listener: Listener) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection(address(listener)) as one:
        one.sendall(greeting + b"\x06" + (1 << 40).to_bytes(8, "big"))  # a command of 1 TiB
        assert refused(listener, 1) == 1


def test_connections_that_say_nothing_disturb_nobody(listener: Listener) -> None:
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(address(listener)))
        node = stack.enter_context(closing(Connection(listener.outside, b"node", keys=NODE_KEYS)))
        for _ in range(50):
            assert say(node, b"hello")
            assert arrived(listener) == [(b"node", b"hello")]
        assert refused(listener, 200) == 200  # when their time is up


def test_nothing_that_is_sent_can_be_read_on_the_way(listener: Listener) -> None:
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:

        def pass_on(source: socket.socket, sink: socket.socket) -> None:
            while chunk := source.recv(1 << 16):
                seen.extend(chunk)
                sink.sendall(chunk)

        def serve() -> None:
            there = stack.enter_context(server.accept()[0])
            here = stack.enter_context(socket.create_connection(address(listener)))
            for ends in ((there, here), (here, there)):
                threading.Thread(target=pass_on, args=ends, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        port = server.getsockname()[1]
        with closing(Connection(f"tcp://127.0.0.1:{port}", b"node", keys=NODE_KEYS)) as node:
            assert say(node, b"a secret prompt")
            assert arrived(listener) == [(b"node", b"a secret prompt")]
            listener.send(b"node", b"a secret answer")
            assert list(node.receive(PATIENCE_S)) == [b"a secret answer"]
    assert len(seen) > 300
    assert b"secret" not in seen
    for key in (COORDINATOR.secret, NODE.secret):
        assert key.encode() not in seen


def test_a_message_of_more_frames_than_one_is_dropped(listener: Listener) -> None:
    with closing(Connection(listener.outside, b"node", keys=NODE_KEYS)) as node:
        assert say(node, b"first")
        assert arrived(listener) == [(b"node", b"first")]
        node._socket.send_multipart([b"two", b"frames"])
        assert say(node, b"last")
        got: list[tuple[bytes, bytes]] = []
        while not got:
            got = arrived(listener)
        assert got == [(b"node", b"last")]


def test_a_connection_that_comes_back_counts_before_the_old_one_is_dead(
    listener: Listener,
) -> None:
    old = Connection(listener.outside, b"node", keys=NODE_KEYS)
    assert say(old, b"old")
    assert arrived(listener) == [(b"node", b"old")]
    with closing(old), closing(Connection(listener.outside, b"node", keys=NODE_KEYS)) as new:
        assert say(new, b"new")
        assert arrived(listener) == [(b"node", b"new")]
        listener.send(b"node", b"to the new one")
        assert list(new.receive(PATIENCE_S)) == [b"to the new one"]


def refusal(node: Connection) -> str:
    """Why it is refused, once it knows."""
    deadline = time.monotonic() + 2 * PATIENCE_S
    while not (reason := node.refusal()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return reason


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (None, "takes nobody without keys; give --keys DIR"),
        (
            NodeKeys(KeyPair.new(), COORDINATOR.public),
            "does not know this node's key; copy its .key file",
        ),
        (NodeKeys(NODE, KeyPair.new().public), "has another key than coordinator.key says"),
    ],
)
def test_a_node_that_is_refused_for_its_keys_is_told_what_fits_them(
    listener: Listener, keys: NodeKeys | None, words: str
) -> None:
    with closing(Connection(listener.outside, b"node", keys=keys)) as stranger:
        assert words in refusal(stranger)


def test_a_node_with_keys_is_told_where_the_coordinator_has_none() -> None:
    with (
        closing(Listener("tcp://127.0.0.1:*")) as bare,
        closing(Connection(bare.endpoint, b"node", keys=NODE_KEYS)) as node,
    ):
        assert "start the coordinator with --keys DIR" in refusal(node)


def test_a_node_that_is_let_in_or_finds_nobody_is_not_refused(listener: Listener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nowhere = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
    with (
        closing(Connection(listener.outside, b"node", keys=NODE_KEYS)) as node,
        closing(Connection(nowhere, b"node", keys=NODE_KEYS)) as early,
    ):
        assert say(node, b"hello")
        time.sleep(QUIET_S)
        assert node.refusal() == ""
        assert early.refusal() == ""


def test_a_tunnel_whose_other_end_is_not_there_yet_is_no_refusal() -> None:
    """As of `ssh -L`: it takes every connection, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as tunnel:
        taken = []

        def close_all() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = tunnel.accept()
                    taken.append(one)
                    one.close()

        threading.Thread(target=close_all, daemon=True).start()
        endpoint = f"tcp://127.0.0.1:{tunnel.getsockname()[1]}"
        with closing(Connection(endpoint, b"node", keys=NODE_KEYS)) as node:
            deadline = time.monotonic() + PATIENCE_S
            while len(taken) < 2 * UNFINISHED_HANDSHAKES and time.monotonic() < deadline:
                assert node.refusal() == ""
                time.sleep(0.02)
            assert len(taken) >= 2 * UNFINISHED_HANDSHAKES
            time.sleep(QUIET_S)
            assert node.refusal() == ""
        tunnel.shutdown(socket.SHUT_RDWR)


def told(node: Connection) -> bytes:
    """The first frame that comes; an empty one that asks whether the node is there is none."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if frames := list(node.receive(QUIET_S)):
            return frames[0]
    return b""


@pytest.mark.parametrize(("theirs", "keys"), [(KEYS, NODE_KEYS), (None, None)])
def test_a_second_process_under_a_name_in_use_is_told_so_and_not_heard(
    theirs: CoordinatorKeys | None, keys: NodeKeys | None
) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(
            closing(Listener("", outside="tcp://127.0.0.1:*", keys=theirs))
        )

        def connect(**more: Any) -> Connection:
            return stack.enter_context(
                closing(Connection(listener.outside, b"node", keys=keys, **more))
            )

        first = connect()
        assert say(first, b"first")
        assert arrived(listener) == [(b"node", b"first")]
        second, beats = connect(life="other"), connect(life="other", is_answered=False)
        for one in (second, beats):
            assert say(one, b"second")
        assert arrived(listener, QUIET_S) == []
        message = decode(told(second))
        assert isinstance(message, Fault)
        assert message.code is FaultCode.UNUSABLE
        assert "another process takes part as node" in message.detail
        (line,) = listener.turned_away()
        assert line == "a second process called itself node and was turned away"
        assert listener.send(b"node", b"to the first")
        assert told(first) == b"to the first"
        assert say(first, b"still there")
        assert arrived(listener) == [(b"node", b"still there")]


def test_a_name_cannot_write_to_the_operators_screen() -> None:
    name = b"\x1b[2Jx\ny"
    with (
        closing(Listener("tcp://127.0.0.1:*")) as bare,
        closing(Connection(bare.endpoint, name)) as first,
        closing(Connection(bare.endpoint, name, life="other")) as second,
    ):
        assert say(first, b"first")
        assert arrived(bare) == [(name, b"first")]
        assert say(second, b"second")
        assert arrived(bare, QUIET_S) == []
        assert bare.turned_away() == [
            r"a second process called itself '\x1b[2Jx\ny' and was turned away"
        ]


def test_a_process_takes_the_name_of_one_that_has_gone(listener: Listener) -> None:
    with closing(Connection(listener.outside, b"node", keys=NODE_KEYS)) as first:
        assert say(first, b"first")
        assert arrived(listener) == [(b"node", b"first")]
    deadline = time.monotonic() + PATIENCE_S
    while listener.send(b"node", b"?"):
        assert time.monotonic() < deadline
    with closing(Connection(listener.outside, b"node", keys=NODE_KEYS, life="other")) as second:
        assert say(second, b"second")
        assert arrived(listener) == [(b"node", b"second")]
        assert listener.turned_away() == []


def test_a_node_that_is_turned_away_ends_with_the_line(listener: Listener) -> None:
    hello = Hello(PROTOCOL_VERSION, Role.DRAFTER, "", Fingerprint(9, "", ()), *HELLO)
    with (
        closing(Connection(listener.outside, b"node", keys=NODE_KEYS)) as first,
        closing(Connection(listener.outside, b"node", keys=NODE_KEYS, life="other")) as second,
    ):
        assert say(first, b"first")
        assert arrived(listener) == [(b"node", b"first")]
        listening = threading.Thread(target=lambda: list(arrived(listener, 2 * QUIET_S)))
        listening.start()
        with pytest.raises(ConfigurationError, match="end it first, or give this node a name"):
            shake_hands(second, hello, PATIENCE_S)
        listening.join()


def test_a_node_that_is_refused_for_its_key_ends_with_the_line(listener: Listener) -> None:
    hello = Hello(PROTOCOL_VERSION, Role.DRAFTER, "", Fingerprint(9, "", ()), *HELLO)
    keys = NodeKeys(KeyPair.new(), COORDINATOR.public)
    with (
        closing(Connection(listener.outside, b"node", keys=keys)) as node,
        pytest.raises(ConfigurationError, match="does not know this node's key"),
    ):
        shake_hands(node, hello, PATIENCE_S)


def test_a_node_whose_key_is_that_of_another_name_ends_with_the_line(listener: Listener) -> None:
    hello = Hello(PROTOCOL_VERSION, Role.DRAFTER, "", Fingerprint(9, "", ()), *HELLO)
    with closing(Connection(listener.outside, b"other", keys=NODE_KEYS)) as node:
        assert say(node, b"let in")
        listening = threading.Thread(target=lambda: list(arrived(listener, 2 * QUIET_S)))
        listening.start()
        with pytest.raises(ConfigurationError, match="knows this key, but not as that of other"):
            shake_hands(node, hello, PATIENCE_S)
        listening.join()


def test_an_older_release_says_no_name_and_is_known_by_its_key(listener: Listener) -> None:
    words = metadata([(b"Socket-Type", b"DEALER"), (b"Identity", b"node")])
    pair, door = (
        Pair(*(z85.decode(key) for key in (NODE.public, NODE.secret))),
        Door(address(listener)[1], z85.decode(COORDINATOR.public), {}),
    )
    with closing(Client(door, pair)) as older:
        older.enter(words)
        older.send(older.message(b"hello"))
        assert arrived(listener) == [(b"node", b"hello")]
        assert listener.send(b"node", b"no")


def test_without_keys_nobody_listens_outside_of_this_host(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--keys DIR .*coordinator keys new DIR"):
        Listener(f"ipc://{tmp_path}/socket", outside="tcp://0.0.0.0:*")
