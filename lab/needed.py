"""Says which package is missing that comes with the lab."""

import sys
from importlib.util import find_spec

from proto.errors import ConfigurationError
from proto.installation import IS_CHECKOUT


def missing(package: str) -> str:
    """Return words for a package that is not installed although the lab depends on it."""
    again = (
        f"run `{sys.executable} -m pip install 'WHEEL'` (WHEEL: the path of the wheel of "
        "slipstream-lab), which also brings what it depends on"
    )
    how = "run `make setup`" if IS_CHECKOUT else again
    return f"the package `{package}`, which comes with slipstream-lab; {how}"


def are_installed(*packages: str) -> bool:
    """Return whether all these packages are there; they are looked for, not imported."""
    return all(find_spec(package) is not None for package in packages)


def check_installed(what: str, *packages: str, otherwise: str = "") -> None:
    """Check that these packages are installed, before a command spends hours on what needs them.

    what       what needs them, for the message
    otherwise  another way to go on, for the end of the message

    Raises ConfigurationError.
    """
    for package in packages:
        if not are_installed(package):
            raise ConfigurationError(f"{what} needs {missing(package)}{otherwise}")
