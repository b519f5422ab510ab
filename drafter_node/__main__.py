"""`python -m drafter_node`: started by the coordinator, with its config on standard input."""

import gc
import sys

from drafter_node.worker import work
from node.process import run_node

if __name__ == "__main__":
    gc.freeze()
    sys.exit(run_node(work))
