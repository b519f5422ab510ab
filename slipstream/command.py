"""The command `slipstream`: `python -m coordinator`, from any folder."""

import sys

from slipstream.finding import ROOT


def main() -> int:
    """Run the command line; returns the exit status.

    The process is ours alone, so the root is in front of everything, as with `python -m`.
    """
    sys.path.insert(0, str(ROOT))
    from proto.installation import COORDINATOR, may_run

    if not may_run("slipstream", COORDINATOR):
        return 2
    # First: until the rest is loaded, Ctrl-C just ends the process.
    from coordinator.__main__ import connect_ray, measurements
    from coordinator.cli.app import main as run

    return run(connect_ray, measurements())
