"""The program `python -m target_node`: the coordinator starts it, with its config on stdin.

With `--join` it is started by hand, and serves one coordinator after another (`node.joining`).
"""

import sys
from typing import TYPE_CHECKING

from node.starting import start

if TYPE_CHECKING:
    from node.loading import Serve


def load_serve() -> "Serve":
    """Import the target's worker, which takes seconds, and return its `serve` function."""
    from target_node.worker import serve

    return serve


if __name__ == "__main__":
    sys.exit(start("target", load_serve))
