"""`python -m coordinator`: the composition root, the only file here that knows `deploy`."""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the imports just ends the process; `main` sees to what comes after.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from coordinator.cli.app import main
from coordinator.cli.flags import Command
from coordinator.cluster.launcher import NodeLauncher
from proto.errors import ConfigurationError
from proto.messages import Role


def connect_ray(address: str, roles: tuple[Role, ...]) -> NodeLauncher:
    """A launcher on a Ray cluster. Only here is Ray loaded. Raises ConfigurationError."""
    try:
        from deploy.ray_launcher import RayLauncher
    except ImportError as error:
        raise ConfigurationError(
            f"--ray needs the package `ray`, which cannot be loaded ({error}); run `make setup`"
        ) from error
    return RayLauncher(address, roles)


def measurements() -> tuple[Command, ...]:
    """The commands that measure."""
    from deploy.experiments.bench import bench
    from deploy.experiments.profile import profile

    return bench, profile


if __name__ == "__main__":
    sys.exit(main(connect_ray, measurements()))
