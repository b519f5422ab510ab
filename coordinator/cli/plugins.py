"""Finds what other packages bring to the command line: their commands, and the launcher for Ray.

`coordinator` imports none of these packages. Two distributions of ours say in their metadata, as
entry points, what they have: `slipstream` itself (`rehearsal`, `deploy`) and `slipstream-lab`. A
command that cannot be had is there all the same, as an `Absent`: it says what to do about it.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.replicas import ReplicasConfig
from coordinator.cli.flags import Command
from coordinator.http.settings import ServeConfig
from coordinator.launching.launcher import ConnectRay, NodeLauncher, Wanted
from proto.errors import ConfigurationError
from proto.installation import IS_CHECKOUT

Say = Callable[[str], None]
ServeReplicas = Callable[
    [str, PairConfig, SpeculationConfig, ServeConfig, ReplicasConfig, str, Say], None
]
PRODUCT, LAB = "slipstream", "slipstream-lab"
COMMAND_GROUP, LAUNCHER_GROUP = "slipstream.commands", "slipstream.launchers"  # of entry points
UNKNOWN = "unknown"  # the version of what was not installed

# THE table of the commands that others bring, in the order of the help, each with its distribution.
COMMANDS = {
    "verify-lossless": PRODUCT,
    "experiment": LAB,
    "profile": LAB,
    "measure": LAB,
    "testbed": LAB,
    "plan": LAB,
    "train-head": LAB,
    "trace-summary": LAB,
}


@dataclass(frozen=True, slots=True)
class Absent:
    """A command that cannot be had here.

    brought_by  the distribution that has it
    line        says why it is not here, and what to do
    """

    name: str
    brought_by: str
    line: str


def commands() -> tuple[Command | Absent, ...]:
    """Return every command of the table, in its order."""
    return tuple(_command(name, brought_by) for name, brought_by in COMMANDS.items())


def _command(name: str, brought_by: str) -> Command | Absent:
    try:
        found: Command = _loaded(f"`{name}`", brought_by, COMMAND_GROUP, name)
    except ConfigurationError as error:
        return Absent(name, brought_by, str(error))
    return found


def connect_ray(wanted: Wanted) -> NodeLauncher:
    """Return a launcher on a Ray cluster. Raises ConfigurationError, TransportError."""
    connect: ConnectRay = _loaded("--ray", PRODUCT, LAUNCHER_GROUP, "ray")
    return connect(wanted)


def ray_serve() -> ServeReplicas:
    """Return what serves with Ray Serve until a signal. Raises ConfigurationError: it is absent."""
    found: ServeReplicas = _loaded("--ray-serve", PRODUCT, LAUNCHER_GROUP, "ray-serve")
    return found


def version() -> str:
    """Return the version of Slipstream that is installed."""
    product = _installed(PRODUCT)
    return UNKNOWN if product is None else product.version


def _loaded(what: str, brought_by: str, group: str, name: str) -> Any:
    """Return the object behind an entry point.

    what        the command or flag, in the words of the message
    brought_by  the distribution that has it

    Raises ConfigurationError: it cannot be had.
    """
    product, bringer = _installed(PRODUCT), _installed(brought_by)
    if product is None:
        raise ConfigurationError(
            f"{what} is found only where Slipstream is installed; {_remedy(PRODUCT, '')}"
        )
    remedy = _remedy(brought_by, product.version)
    if bringer is None:
        raise ConfigurationError(f"{what} comes with {brought_by}, which is not here; {remedy}")
    if bringer.version != product.version:
        raise ConfigurationError(
            f"{what}: {brought_by} {bringer.version} is here beside slipstream "
            f"{product.version}; {remedy}"
        )
    points = tuple(bringer.entry_points.select(group=group, name=name))
    if not points:
        raise ConfigurationError(f"{what} is not in the {brought_by} that is here; {remedy}")
    try:
        return points[0].load()
    except MemoryError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigurationError(
            f"{what} of {brought_by} cannot be loaded ({reason}); {remedy}"
        ) from error


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _remedy(name: str, wanted: str) -> str:
    """Return what to type so that a distribution is there in the wanted version ("": in any)."""
    if IS_CHECKOUT:
        return "run `make setup`"
    # Not by its name from an index: somebody else might have taken that name there.
    exact = f" {wanted}" if wanted else ""
    command = f"{sys.executable} -m pip install 'WHEEL'"
    return f"run `{command}` (WHEEL: the path of the wheel of {name}{exact})"
