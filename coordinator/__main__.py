"""`python -m coordinator`: the composition root, the only file that imports `deploy` and `lab`.

Slow imports are made only when they are needed. So from the beginning a signal, or lack of memory,
ends the process with one line.
"""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from coordinator.cli import process
from proto.installation import COORDINATOR, EXIT_UNUSABLE, may_run

if TYPE_CHECKING:
    from coordinator.cli.flags import Command
    from coordinator.launching.launcher import NodeLauncher, Wanted


def connect_ray(wanted: "Wanted") -> "NodeLauncher":
    """Return a launcher on a Ray cluster; Ray is imported only here.

    Raises ConfigurationError, TransportError.
    """
    from deploy import ray_address
    from proto.errors import ConfigurationError

    needed = "--ray needs the package `ray`, which"
    if find_spec("ray") is None:
        raise ConfigurationError(f"{needed} is not installed; run `make setup`")
    ray_address.check(wanted.address)
    try:
        from deploy.ray_launcher import RayLauncher
    except ImportError as error:
        raise ConfigurationError(
            f"{needed} cannot be loaded ({error}); run `make setup`"
        ) from error
    return RayLauncher(wanted)


def measurements() -> "tuple[Command, ...]":
    """Return the lab's commands: proofs, experiments, profiles, testbeds, plans, traces."""
    from lab.experiments.command import experiment
    from lab.lossless.command import verify_lossless
    from lab.measure.profile import profile
    from lab.plan.command import plan
    from lab.testbeds.command import testbed
    from lab.trace.command import trace_summary

    return verify_lossless, experiment, profile, testbed, plan, trace_summary


def main(program: str = "coordinator") -> int:
    """Run the command line in its own process; return the exit status.

    program  the name after `python -m`, or of the command
    """
    process.end_at_once_on_signals()
    with process.lack_of_memory_said():
        if not may_run(program, COORDINATOR):
            return EXIT_UNUSABLE
        from coordinator.cli.app import main as run

        return run(connect_ray, measurements())


if __name__ == "__main__":
    sys.exit(main())
