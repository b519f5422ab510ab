"""`python -m target_node`: started by the coordinator, with its config on standard input.

With `--join` by hand, for one coordinator after another (`node.joining`).
"""

import gc
import sys
from typing import TYPE_CHECKING

from node.process import Heart, run_node
from proto.links.transport import Connection
from proto.node_config import NodeConfig

if TYPE_CHECKING:
    from node.joining import Worker


def work(config: NodeConfig, connection: Connection, heart: Heart) -> None:
    """Do the node's work. Its import takes seconds: by then the lifeline must hold."""
    from target_node import worker

    gc.freeze()
    worker.work(config, connection, heart)


def join() -> int:
    """Serve coordinators elsewhere; returns the exit status."""
    from node.joining import main
    from proto.messages import Role

    def worker() -> "Worker":
        from target_node import worker

        return worker

    return main(Role.TARGET, worker)


if __name__ == "__main__":
    sys.exit(join() if len(sys.argv) > 1 else run_node(work))
