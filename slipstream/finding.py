"""Lets a program in any folder import two packages of the repository, and no others.

`sys.path` is not changed. With our root at its front, a program that imports its own `models`,
`engine` or `tests` would get ours; with the root at its end, our `proto` could be that of the
distribution proto-plus. Instead a finder at the front of `sys.meta_path` answers for two names
only.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]  # `make setup` puts a link to this package elsewhere
NAMES = ("coordinator", "proto")  # the packages that the Python API needs


class Finder:
    """An import finder that finds the packages in NAMES in the repository, before others."""

    @staticmethod
    def find_spec(
        name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return the spec of a package in NAMES; None for others (`MetaPathFinder`).

        Modules inside a package are found by the package's path. The types are in quotes because a
        Python that is too old reads this file before it gets the message that it is too old.
        """
        is_ours = path is None and name in NAMES
        return PathFinder.find_spec(name, [str(ROOT)], target) if is_ours else None


def find_packages() -> None:
    """Make the two packages importable from now on. May be called twice."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


def check_names() -> None:
    """Raise ImportError if this process has loaded another package with one of these names."""
    for name in NAMES:
        loaded = sys.modules.get(name)
        if loaded is None:
            continue
        folders = [Path(folder).resolve() for folder in getattr(loaded, "__path__", ())]
        if ROOT / name in folders:
            continue
        where = folders[0] if folders else getattr(loaded, "__file__", "somewhere")
        raise ImportError(
            f"slipstream has a package {name!r}, and this process has loaded another one, from "
            f"{where}; use the two in processes of their own (docs/adr/0001)"
        )
