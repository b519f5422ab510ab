"""What an operator is told of connections that are not let in: each line once."""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from coordinator.cluster.service import MAX_SAID, Service
from coordinator.cluster.snapshot import OTHER_NAME
from proto.codec import encode
from proto.links.keys import CoordinatorKeys, KeyPair, NodeKeys
from proto.links.transport import Connection
from proto.messages import Fault, FaultCode, Role
from proto.node_config import NodeConfig
from tests.hostile.besieged import by_hand

PATIENCE_S = 10.0
COORDINATOR, NODE = KeyPair.new(), KeyPair.new()
KEYS = CoordinatorKeys(COORDINATOR, {b"drafter-1": NODE.public})
KNOWN, UNKNOWN = (NodeKeys(pair, COORDINATOR.public) for pair in (NODE, KeyPair.new()))
COORDINATOR_WITHOUT_KEYS = (
    "refused a connection to {}: it is no node, or one with keys; "
    "where nodes have keys the coordinator is given --keys DIR too"
)


@contextmanager
def serving(keys: CoordinatorKeys | None) -> Iterator[Service]:
    """A coordinator that waits for nodes."""
    service = Service(by_hand(keys))
    service.start()
    try:
        yield service
    finally:
        service.close()


def within(is_so: Callable[[], bool]) -> bool:
    """Whether it comes to be so."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := is_so()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("theirs", "own", "line"),
    [
        (KEYS, UNKNOWN, "refused a connection to {}: its key is not known here"),
        (KEYS, None, "refused a connection to {}: it has shown no key"),
        (None, KNOWN, COORDINATOR_WITHOUT_KEYS),
    ],
)
def test_a_refused_connection_is_told_of_once_with_its_cause(
    theirs: CoordinatorKeys | None,
    own: NodeKeys | None,
    line: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        serving(theirs) as service,
        closing(Connection(service.outside or service.endpoint, b"drafter-1", keys=own)),
        closing(Connection(service.outside or service.endpoint, b"drafter-1", keys=own)),
    ):
        assert within(lambda: service.num_refused > 1)
        assert caplog.messages == [line.format(service.outside or service.endpoint)]


def test_a_node_with_a_known_key_is_not_told_of_as_one_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def calls_itself(name: str) -> bool:
        line = f"a node with the key of drafter-1 called itself {name}, and was turned away"
        with closing(Connection(service.outside, name.encode(), keys=KNOWN)) as node:
            return within(lambda: node.send(b"hello")) and within(lambda: line in caplog.messages)

    with caplog.at_level(logging.WARNING), serving(KEYS) as service:
        with closing(Connection(service.outside, b"drafter-1", keys=KNOWN)):
            time.sleep(0.3)
        time.sleep(0.3)
        assert caplog.messages == []
        assert calls_itself("target-1")
        assert len(caplog.messages) == 1
        for number in range(MAX_SAID + 5):
            with closing(Connection(service.outside, b"%d" % number, keys=KNOWN)) as node:
                assert within(lambda node=node: node.send(b"hello"))
        assert within(lambda: service.tally.refusals[OTHER_NAME] == MAX_SAID + 6)
        assert len(caplog.messages) == MAX_SAID
        assert set(service.tally.refusals) == {OTHER_NAME}


def test_whoever_speaks_another_protocol_has_shown_no_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), serving(KEYS) as service:
        port = int(service.outside.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert within(lambda: service.num_refused > 0)
        assert caplog.messages == [
            f"refused a connection to {service.outside}: it has shown no key"
        ]


def test_processes_under_a_name_in_use_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    line = "a second process called itself drafter-1 and was turned away"
    with (
        caplog.at_level(logging.WARNING),
        serving(KEYS) as service,
        ExitStack() as stack,
    ):
        nodes = [
            stack.enter_context(
                closing(Connection(service.outside, b"drafter-1", keys=KNOWN, life=life))
            )
            for life in ("one", "another", "third")
        ]
        told: set[int] = set()

        def two_were_told() -> bool:
            told.update(at for at, node in enumerate(nodes) if list(node.receive(0.02)))
            return len(told) >= 2

        assert within(two_were_told)
        assert within(lambda: line in caplog.messages)
        assert caplog.messages.count(line) == 1
        assert len(told) == 2


@pytest.mark.parametrize("name", ["drafter-1", "target-1"])
def test_a_node_by_hand_that_was_not_accepted_cannot_end_the_coordinator(name: str) -> None:
    keys = CoordinatorKeys(COORDINATOR, {name.encode(): NODE.public})
    faults = [Fault(0, 0, code, "no such model") for code in (FaultCode.UNUSABLE, FaultCode.FAILED)]
    with (
        serving(keys) as service,
        closing(Connection(service.outside, name.encode(), keys=KNOWN)) as stranger,
    ):
        role = Role(name.removesuffix("-1"))
        service.launch(NodeConfig(role, service.endpoint, name, service.secret, "model"))
        for fault in faults:
            assert within(lambda fault=fault: stranger.send(encode(fault)))
        num_bytes = sum(len(encode(fault)) for fault in faults)
        assert within(lambda: service.num_bytes >= num_bytes), "they were not heard"
        service.check_alive()
        assert set(service.states()) == {role}, "it is not waited for any more"
