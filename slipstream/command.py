"""The commands of an installed Slipstream, from any folder.

`slipstream` is `python -m coordinator`. `slipstream-target` and `slipstream-drafter` are
`python -m target_node` and `python -m drafter_node`, for nodes that are started by hand.

Each has a process of its own, so the root is in front of everything, as with `python -m`.
"""

import runpy
import sys

from slipstream.finding import ROOT


def main() -> int:
    """Run the command line; returns the exit status."""
    sys.path.insert(0, str(ROOT))
    from proto.installation import EXIT_UNUSABLE, may_run

    # Without packages to look for: this is about the system, of which all that follows is made.
    if not may_run("slipstream", ()):
        return EXIT_UNUSABLE
    from coordinator.__main__ import main as run

    return run("slipstream")


def target() -> None:
    """Start a target by hand; ends the process with the node's exit status."""
    _run_node("target_node")


def drafter() -> None:
    """Start a drafter by hand; ends the process with the node's exit status."""
    _run_node("drafter_node")


def _run_node(module: str) -> None:
    sys.path.insert(0, str(ROOT))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
