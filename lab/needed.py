"""Says which package is missing that comes with the lab."""

from proto.installation import IS_CHECKOUT


def missing(package: str) -> str:
    """Return words for a package that is not installed although the lab depends on it."""
    again = "install slipstream-lab again, together with what it depends on (`pip install`)"
    how = "run `make setup`" if IS_CHECKOUT else again
    return f"the package `{package}`, which comes with slipstream-lab; {how}"
