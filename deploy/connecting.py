"""Connects to a Ray cluster, for `--ray`; Ray is imported only when that is asked for.

The command line finds `connect_ray` by its entry point (`slipstream.launchers` in pyproject.toml).
"""

from importlib.util import find_spec

from coordinator.launching.launcher import NodeLauncher, Wanted
from deploy import ray_address
from proto.errors import ConfigurationError
from proto.installation import missing


def connect_ray(wanted: Wanted) -> NodeLauncher:
    """Return a launcher on a Ray cluster. Raises ConfigurationError, TransportError."""
    if find_spec("ray") is None:
        raise ConfigurationError(f"--ray needs {missing('ray', 'ray')}")
    ray_address.check(wanted.address)
    try:
        from deploy.ray_launcher import RayLauncher
    except ImportError as error:
        raise ConfigurationError(f"the package `ray` cannot be loaded: {error}") from error
    return RayLauncher(wanted)
