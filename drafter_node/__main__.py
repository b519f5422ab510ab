"""`python -m drafter_node`: started by the coordinator, with its config on standard input.

With `--join` by hand, for one coordinator after another (`node.joining`).
"""

import sys

from node.ending import end_at_once_on_signals

if __name__ == "__main__" and len(sys.argv) > 1:
    end_at_once_on_signals("drafter")

import gc
from typing import TYPE_CHECKING

from proto.installation import NODE, may_run

if __name__ == "__main__" and not may_run("drafter_node", NODE):
    sys.exit(2)

from node.process import Heart, run_node
from proto.links.transport import Connection
from proto.node_config import NodeConfig

if TYPE_CHECKING:
    from node.loop import Serve


def work(config: NodeConfig, connection: Connection, heart: Heart) -> None:
    """Do the node's work. Its import takes seconds: by then the lifeline must hold."""
    from drafter_node.worker import serve
    from node import loop

    gc.freeze()
    loop.work(config, connection, heart, serve)


def join() -> int:
    """Serve coordinators elsewhere; returns the exit status."""
    from node.joining import main
    from proto.messages import Role

    def load_serve() -> "Serve":
        from drafter_node.worker import serve

        return serve

    return main(Role.DRAFTER, load_serve)


if __name__ == "__main__":
    sys.exit(join() if len(sys.argv) > 1 else run_node(work))
