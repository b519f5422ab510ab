"""`python -m lab.experiments experiment FILE`: the command line, also where nothing is installed.

There `python -m coordinator` does not find the commands of the lab (`coordinator/cli/plugins.py`).
The GPU kit runs its experiments so.
"""

import sys

from coordinator.cli.app import main
from lab.experiments.command import experiment

if __name__ == "__main__":
    sys.exit(main(plugins=(experiment,)))
