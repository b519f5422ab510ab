"""A coordinator without models, in a process of its own, for tests that try to end it.

Standard input: one line of JSON with its keys. Standard output: its port; it ends with its input.
"""

import json
import logging
import os
import sys

from coordinator.cluster.service import Service
from coordinator.launching.launcher import Obituary
from proto.links.keys import CoordinatorKeys, KeyPair
from proto.messages import Role
from proto.node_config import NodeConfig

NAMES = {
    "drafter-1": Role.DRAFTER,
    "drafter-2": Role.DRAFTER,
    "drafter-3": Role.DRAFTER,
    "target-1": Role.TARGET,
}


class Nobody:
    """A launcher of nodes that join by hand."""

    is_by_hand = True

    def __init__(self, keys: CoordinatorKeys | None) -> None:
        self.keys = keys
        self.endpoint, self.outside = "", "tcp://127.0.0.1:*"
        self.secret = "" if keys is None else keys.own.public

    def start(self, config: NodeConfig) -> None:
        """Nothing."""

    def ended(self) -> list[Obituary]:
        """Nobody."""
        return []

    def has_room_again(self) -> bool:
        """Nothing is started here."""
        return False

    def pids(self) -> dict[str, int]:
        """None."""
        return {}

    def close(self) -> None:
        """Nothing."""


def say(line: str) -> None:
    """Tell whoever has started this process."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Listen until standard input ends."""
    logging.basicConfig(level=logging.ERROR)
    given = json.loads(sys.stdin.readline())
    nodes = {name.encode(): key for name, key in given["nodes"].items()}
    service = Service(Nobody(CoordinatorKeys(KeyPair(given["public"], given["secret"]), nodes)))
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
