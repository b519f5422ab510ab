"""No peer ends the coordinator, whatever its keys. Each attack is made on a process of its own."""

import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from zmq.utils import z85

from proto.links.gate import Backlog
from proto.links.keys import CoordinatorKeys, KeyPair
from proto.links.transport import FRAMES_AT_ONCE, Listener
from tests.hostile.at_a_node import BETWEEN, campaign
from tests.hostile.campaign import besiege
from tests.hostile.curve import MORE, Client, Door, Pair, metadata
from tests.hostile.sessions import GUESTS, STRANGERS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
GROWTH_KIB = 32 << 10  # of a process that keeps nothing
PAUSE_S = 5.0  # of a machine that has other things to do
COORDINATOR, NODE = Pair.new(), Pair.new()
CLAIM = metadata([(b"Socket-Type", b"DEALER"), (b"Identity", b"x"), (b"X-Node", b"work 1 node")])


def listener() -> Listener:
    """It knows one node."""
    own = KeyPair(z85.encode(COORDINATOR.public).decode(), z85.encode(COORDINATOR.secret).decode())
    keys = CoordinatorKeys(own, {b"node": z85.encode(NODE.public).decode()})
    return Listener("", outside="tcp://127.0.0.1:*", keys=keys)


def client(listening: Listener, properties: bytes = CLAIM) -> Client:
    """One that was let in."""
    port = int(listening.outside.rpartition(":")[2])
    found = Client(Door(port, COORDINATOR.public, {}), NODE)
    found.enter(properties)
    found.send(found.message(b""))
    return found


def heard(listening: Listener, wanted: bytes) -> bool:
    """Whether this frame comes."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if (b"node", wanted) in list(listening.receive(0.05)):
            return True
    return False


def is_cut_off(listening: Listener, one: Client) -> bool:
    """Whether it cannot send parts of one message without end."""
    try:
        for _ in range(1000):
            one.send(one.message(bytes(10_000), MORE))
            list(listening.receive(0.0))
            assert listening.num_refused >= 0  # where it looks
    except OSError:
        return True
    return False


def survives(attack: str) -> bool:
    """Whether a process lives through one of the functions below."""
    code = f"from tests.hostile.test_hostile import {attack}; {attack}()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGABRT), done.stderr
    return done.returncode == 0


def ping_from_a_broken_connection() -> None:
    """Whoever reads later finds a full queue, a PING behind it, and nobody there."""
    with closing(listener()) as listening:
        one = client(listening)
        one.send(b"".join(one.message(b"x") for _ in range(5000)))
        one.send(b"".join(one.message(b"\x04PING\x00\x01", 2) for _ in range(100)))
        time.sleep(0.3)
        one.close(is_reset=True)
        time.sleep(0.3)
        with closing(client(listening)) as other:
            other.send(other.message(b"hello"))
            assert heard(listening, b"hello")


def one_name_many_times() -> None:
    """Connections of one identity that send and go."""
    with closing(listener()) as listening:
        until = time.monotonic() + 4.0

        def come_and_go() -> None:
            while time.monotonic() < until:
                ones = [client(listening) for _ in range(3)]
                for one in ones:
                    one.send(b"".join(one.message(bytes(2000)) for _ in range(2000)))
                for one in ones:
                    one.close(is_reset=True)

        threads = [threading.Thread(target=come_and_go, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for _ in listening.receive(0.01):
                time.sleep(0.0001)  # slower than they send
        with closing(client(listening)) as last:
            last.send(last.message(b"hello"))
            assert heard(listening, b"hello")


@pytest.mark.process
@pytest.mark.parametrize(
    "attack",
    [
        ping_from_a_broken_connection,
        pytest.param(one_name_many_times, marks=pytest.mark.long),
    ],
)
def test_a_known_attack_of_a_node_with_a_key_does_not_end_the_process(attack: object) -> None:
    assert survives(getattr(attack, "__name__", ""))


@pytest.mark.timed
@pytest.mark.process
def test_sessions_that_break_the_rules_end_and_disturb_nobody() -> None:
    outcome = besiege(600, seed=1, warm_up=100)
    assert outcome.status == 0, outcome.errors
    assert set(outcome.kinds) == {session.__name__ for session in (*STRANGERS, *GUESTS)}
    assert outcome.num_answers > 10
    assert outcome.longest_s < PAUSE_S
    assert outcome.num_refused > 100


@pytest.mark.process
def test_damaged_frames_end_at_most_the_connection_and_a_node_drafts_right_after_them() -> None:
    seen = campaign(BETWEEN + 100, seed=3)
    assert seen["honest texts"] == 3
    assert seen["closed: RemoteProtocolError"] > 10


@pytest.mark.timed
@pytest.mark.process
@pytest.mark.long
def test_thousands_of_such_sessions_leave_nothing_behind() -> None:
    outcome = besiege(8000, seed=2, warm_up=2000)
    assert outcome.status == 0, outcome.errors
    assert sum(outcome.kinds.values()) == 8000
    assert outcome.longest_s < PAUSE_S
    before, after = outcome.kib
    assert after - before < GROWTH_KIB


def test_the_client_of_these_tests_is_heard_like_a_node() -> None:
    with closing(listener()) as listening, closing(client(listening)) as one:
        one.send(one.message(b"hello"))
        assert heard(listening, b"hello")


@pytest.mark.parametrize("identity", [b"", b"node", b"\0abcd", bytes(255), bytes(300)])
def test_the_identity_that_a_peer_asks_for_is_not_given(identity: bytes) -> None:
    words = [(b"Socket-Type", b"DEALER"), (b"Identity", identity), (b"X-Node", b"work 1 node")]
    with closing(listener()) as listening, closing(client(listening, metadata(words))) as one:
        one.send(one.message(b"hello"))
        assert heard(listening, b"hello")
        assert [len(given) for given in listening._peers] == [16]
        assert identity not in listening._peers


def test_whoever_sends_without_end_does_not_keep_the_reader() -> None:
    with closing(listener()) as listening, closing(client(listening)) as one:
        one.send(b"".join(one.message(b"x") for _ in range(3 * FRAMES_AT_ONCE)))
        assert heard(listening, b"x")
        time.sleep(0.5)
        assert len(list(listening.receive(1.0))) <= FRAMES_AT_ONCE


def test_a_message_without_a_last_part_is_cut_off_before_it_fills_the_memory() -> None:
    with closing(listener()) as listening, closing(client(listening)) as one:
        assert listening._gate is not None
        listening._gate._backlog = Backlog(limit_bytes=1 << 20)
        one.send(one.message(b"hello"))
        assert heard(listening, b"hello")
        with closing(client(listening)) as other:
            assert is_cut_off(listening, other)
        one.send(one.message(b"still there"))
        assert heard(listening, b"still there")
