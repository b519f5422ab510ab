"""`python -m coordinator`: the composition root, the only file here that knows `deploy`."""

import signal
import sys
from importlib.util import find_spec

from proto.installation import COORDINATOR, may_run

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the imports just ends the process; `main` sees to what comes after.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# `slipstream.command` has asked already.
if __name__ == "__main__" and not may_run("coordinator", COORDINATOR):
    sys.exit(2)

from coordinator.cli.app import main
from coordinator.cli.flags import Command
from coordinator.launching.launcher import NodeLauncher, Wanted
from proto.errors import ConfigurationError


def connect_ray(wanted: Wanted) -> NodeLauncher:
    """A launcher on a Ray cluster. Only here is Ray loaded.

    Raises ConfigurationError, TransportError.
    """
    from deploy import ray_address

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


def measurements() -> tuple[Command, ...]:
    """The commands that measure, make what is measured, predict, and read traces."""
    from deploy.experiments.command import experiment
    from deploy.measurements.profile import profile
    from deploy.outlook.command import plan
    from deploy.outlook.testbed import testbed
    from deploy.tracing.command import trace_summary

    return experiment, profile, testbed, plan, trace_summary


if __name__ == "__main__":
    sys.exit(main(connect_ray, measurements()))
