"""What a node says that was started by hand."""

from node.joining import waiting
from proto.links.keys import KeyPair, NodeKeys, with_keys
from proto.messages import Role
from proto.node_config import NodeConfig

BARE = NodeConfig(Role.DRAFTER, "tcp://127.0.0.1:5555", "drafter-1", "", "model")


def test_only_a_node_with_keys_waits_for_a_coordinator_that_knows_its_key() -> None:
    line = "waits for a coordinator at tcp://127.0.0.1:5555"
    assert waiting(BARE) == line
    keys = NodeKeys(KeyPair.new(), KeyPair.new().public)
    assert waiting(with_keys(BARE, keys)) == f"{line} that knows its key"
