"""The command `slipstream`: `python -m coordinator`, from any folder."""

import sys

from slipstream.finding import ROOT


def main() -> int:
    """Run the command line; returns the exit status.

    The process is ours alone, so the root is in front of everything, as with `python -m`.
    """
    sys.path.insert(0, str(ROOT))
    from coordinator.__main__ import main as run

    return run("slipstream")
