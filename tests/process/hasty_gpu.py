"""A node beside a played GPU that reads results before they are there: a planted fault."""

import sys
from typing import Any

from node.starting import start
from tests.process.played_gpu import load_serve as load_played


def load_serve() -> Any:
    """Import both workers, and let each forward seem to have ended at once."""
    serve = load_played()
    from node import forwards

    hasty: Any = forwards.OnDevice
    hasty.is_ready = lambda _: True
    return serve


if __name__ == "__main__":
    sys.exit(start("node", load_serve))
