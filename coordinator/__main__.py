"""`python -m coordinator`: the composition root, the only file that imports `deploy`, `lab` and
`slipstream`.

Slow imports are made only when they are needed. So from the beginning a signal, or lack of memory,
ends the process with one line.
"""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from coordinator.cli import process
from proto.installation import COORDINATOR, EXIT_UNUSABLE, may_run, missing

if TYPE_CHECKING:
    from coordinator.cli.flags import Command
    from coordinator.launching.launcher import NodeLauncher, Wanted


def connect_ray(wanted: "Wanted") -> "NodeLauncher":
    """Return a launcher on a Ray cluster; Ray is imported only here.

    Raises ConfigurationError, TransportError.
    """
    from deploy import ray_address
    from proto.errors import ConfigurationError

    if find_spec("ray") is None:
        raise ConfigurationError(f"--ray needs {missing('ray', 'ray')}")
    ray_address.check(wanted.address)
    try:
        from deploy.ray_launcher import RayLauncher
    except ImportError as error:
        raise ConfigurationError(f"the package `ray` cannot be loaded: {error}") from error
    return RayLauncher(wanted)


def measurements() -> "tuple[Command, ...]":
    """Return the lab's commands."""
    from lab.experiments.command import experiment
    from lab.lossless.command import verify_lossless
    from lab.measure.profile import profile
    from lab.pair.command import measure
    from lab.plan.command import plan
    from lab.testbeds.command import testbed
    from lab.trace.command import trace_summary
    from lab.training.command import train_head

    measuring = verify_lossless, experiment, profile, measure
    return *measuring, testbed, plan, train_head, trace_summary


def main(program: str = "coordinator") -> int:
    """Run the command line in its own process; return the exit status.

    program  the name after `python -m`, or of the command
    """
    process.end_at_once_on_signals()
    with process.lack_of_memory_said():
        if not may_run(program, COORDINATOR):
            return EXIT_UNUSABLE
        from coordinator.cli.app import main as run
        from slipstream import __version__

        return run(connect_ray, measurements(), __version__)


if __name__ == "__main__":
    sys.exit(main())
