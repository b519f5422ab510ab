"""`python -m coordinator`: the composition root, the only file here that knows `deploy`, `lab` and
`slipstream`.

What takes time to import is imported when it is needed: until then a signal, or too little memory,
already ends with a line.
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
    """A launcher on a Ray cluster. Only here is Ray loaded.

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
    """The commands of the lab: proofs, measurements, what is measured, predictions, traces."""
    from lab.experiments.command import experiment
    from lab.lossless.command import verify_lossless
    from lab.measure.profile import profile
    from lab.plan.command import plan
    from lab.testbeds.command import testbed
    from lab.trace.command import trace_summary

    return verify_lossless, experiment, profile, testbed, plan, trace_summary


def main(program: str = "coordinator") -> int:
    """Run the command line in a process of its own; returns the exit status.

    program  what was typed behind `python -m`
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
