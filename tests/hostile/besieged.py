"""A coordinator without models, in a process of its own, for tests that try to end it.

Standard input: one line of JSON with its keys. Standard output: its port; it ends with its input.
"""

import json
import logging
import os
import sys

from coordinator.cluster.service import Service
from coordinator.launching.remote import RemoteNodes
from proto.links.keys import CoordinatorKeys, KeyPair
from proto.messages import Role
from proto.node_config import NodeConfig

ADDRESS = "tcp://127.0.0.1:*"
NAMES = {
    "drafter-1": Role.DRAFTER,
    "drafter-2": Role.DRAFTER,
    "drafter-3": Role.DRAFTER,
    "target-1": Role.TARGET,
}


def by_hand(keys: CoordinatorKeys | None) -> RemoteNodes:
    """A launcher of nodes that join by hand, with keys that lie in no folder."""
    nodes = RemoteNodes(ADDRESS, None, ())
    if keys is not None:
        nodes.keys, nodes.secret = keys, keys.own.public
        nodes.endpoint, nodes.outside = "", ADDRESS
    return nodes


def say(line: str) -> None:
    """Tell whoever has started this process."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Listen until standard input ends."""
    logging.basicConfig(level=logging.ERROR)
    given = json.loads(sys.stdin.readline())
    nodes = {name.encode(): key for name, key in given["nodes"].items()}
    service = Service(by_hand(CoordinatorKeys(KeyPair(given["public"], given["secret"]), nodes)))
    service.start()
    for name, role in NAMES.items():
        if role is Role.DRAFTER:
            service.launch(NodeConfig(role, service.endpoint, name, service.secret, "model"))
    say(service.outside.rpartition(":")[2])
    while os.read(0, 1):
        service.check_alive()
        say(str(service.num_refused))
    service.check_alive()
    service.close()


if __name__ == "__main__":
    main()
