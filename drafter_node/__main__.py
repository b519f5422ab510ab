"""The program `python -m drafter_node`: the coordinator starts it, with its config on stdin.

With `--join` it is started by hand, and serves one coordinator after another (`node.joining`).
"""

import sys
from typing import TYPE_CHECKING

from node.starting import start

if TYPE_CHECKING:
    from node.loading import Serve


def load_serve() -> "Serve":
    """Import the drafter's worker, which takes seconds, and return its `serve` function."""
    from drafter_node.worker import serve

    return serve


if __name__ == "__main__":
    sys.exit(start("drafter", load_serve))
