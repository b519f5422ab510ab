"""`python -m target_node`: started by the coordinator, with its config on standard input."""

import gc
import sys

from node.process import run_node
from target_node.worker import work

if __name__ == "__main__":
    gc.freeze()
    sys.exit(run_node(work))
