"""`python -m target_node`: started by the coordinator, with its config on standard input."""

import gc
import sys

from node.process import Heart, run_node
from proto.node_config import NodeConfig
from proto.transport import Connection


def work(config: NodeConfig, connection: Connection, heart: Heart) -> None:
    """Do the node's work. Its import takes seconds: by then the lifeline must hold."""
    from target_node import worker

    gc.freeze()
    worker.work(config, connection, heart)


if __name__ == "__main__":
    sys.exit(run_node(work))
