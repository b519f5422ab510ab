"""`python -m target_node`: started by the coordinator, with its config on standard input.

With `--join` by hand, for one coordinator after another (`node.joining`).
"""

import sys
from typing import TYPE_CHECKING

from node.starting import start

if TYPE_CHECKING:
    from node.loop import Serve


def load_serve() -> "Serve":
    """Import what the node does, which takes seconds."""
    from target_node.worker import serve

    return serve


if __name__ == "__main__":
    sys.exit(start("target", load_serve))
