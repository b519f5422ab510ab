"""How a coordinator leaves nodes that were started by hand: over real sockets, with keys."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from coordinator.cluster import service as services
from coordinator.cluster.link import Link, Links
from coordinator.cluster.service import Service
from coordinator.launching.remote import RemoteNodes
from proto.codec import decode, encode
from proto.links.keys import CoordinatorKeys, KeyPair, NodeKeys
from proto.links.transport import Connection
from proto.messages import Fault, FaultCode, Role, Welcome
from proto.node_config import NodeConfig
from tests.coordinator.test_behaviours import hello

PATIENCE_S = 5.0
FORWARD_S = 0.4
COORDINATOR, NODE = KeyPair.new(), KeyPair.new()
NAMES = {Role.TARGET: b"target-1", Role.DRAFTER: b"drafter-1"}
FAR = Links(Link(delay_s=0.2), Link(delay_s=0.2))


def remote_nodes() -> RemoteNodes:
    """A launcher for nodes that all have one key."""
    launcher = RemoteNodes("tcp://127.0.0.1:*", None, ())
    launcher.keys = CoordinatorKeys(COORDINATOR, dict.fromkeys(NAMES.values(), NODE.public))
    launcher.endpoint, launcher.outside, launcher.secret = "", launcher.endpoint, "secret"
    return launcher


@pytest.fixture(params=["near", "far"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A coordinator that expects its nodes, the second one over simulated links."""
    links = dict.fromkeys(Role, FAR) if request.param == "far" else {}
    running = Service(remote_nodes(), links=links)
    running.start()
    for role, name in NAMES.items():
        running.launch(NodeConfig(role, running.outside, name.decode(), "secret", "m"))
    yield running
    running.close()


def joined(service: Service, role: Role) -> Connection:
    """A node that is welcome."""
    node = Connection(service.outside, NAMES[role], keys=NodeKeys(NODE, COORDINATOR.public))
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        node.send(encode(hello(role)))
        if any(isinstance(decode(frame), Welcome) for frame in node.receive(0.1)):
            return node
    raise AssertionError("no welcome came")


def hears_the_end(node: Connection) -> bool:
    """Whether what has come and comes within a moment says that the coordinator ends."""
    messages = [decode(frame) for frame in node.receive(0.1)]
    return any(isinstance(one, Fault) and one.code is FaultCode.CLOSED for one in messages)


def test_nodes_in_the_middle_of_a_forward_hear_that_the_coordinator_ends(service: Service) -> None:
    with (
        closing(joined(service, Role.TARGET)) as target,
        closing(joined(service, Role.DRAFTER)) as drafter,
    ):
        ending = threading.Thread(target=service.close)
        ending.start()
        time.sleep(FORWARD_S)  # meanwhile neither reads anything
        assert [hears_the_end(node) for node in (target, drafter)] == [True, True]
    ending.join(services.GOODBYE_LIMIT_S + PATIENCE_S)
    assert not ending.is_alive()


def test_nodes_that_have_hung_up_are_not_waited_for(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "GOODBYE_LIMIT_S", PATIENCE_S)
    joined(service, Role.TARGET).close()
    began = time.monotonic()
    service.close()
    assert time.monotonic() - began < PATIENCE_S


def test_a_node_that_says_nothing_is_waited_for_no_longer_than_the_limit(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "GOODBYE_LIMIT_S", 0.2)
    with closing(joined(service, Role.TARGET)):
        service.close()
        assert not service._thread.is_alive()
