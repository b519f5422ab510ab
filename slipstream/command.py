"""The command `slipstream`: the same as `python -m coordinator`, from any folder."""

import sys

from slipstream.finding import ROOT


def main() -> int:
    """Run the command line; return the exit status.

    The process runs no other program, so the repository's root comes first in `sys.path`, as with
    `python -m`.
    """
    sys.path.insert(0, str(ROOT))
    from coordinator.__main__ import main as run

    return run("slipstream")
