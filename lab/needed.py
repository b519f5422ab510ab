"""Says which package is missing that comes with the lab."""

import sys

from proto.installation import IS_CHECKOUT


def missing(package: str) -> str:
    """Return words for a package that is not installed although the lab depends on it."""
    again = (
        f"run `{sys.executable} -m pip install 'WHEEL'` (WHEEL: the path of the wheel of "
        "slipstream-lab), which also brings what it depends on"
    )
    how = "run `make setup`" if IS_CHECKOUT else again
    return f"the package `{package}`, which comes with slipstream-lab; {how}"
