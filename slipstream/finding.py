"""Where the rest of Slipstream lies, and how a program in any folder finds the packages it needs.

`sys.path` stays as it is: with the root in front a program's own `models`, `engine` or `tests`
would be ours, and with the root at the end our `proto` would be that of the distribution
proto-plus, where there is one. A finder in front answers for three names alone, and for `engine`
only where code of ours asks: a program may have a module of that name.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

NAMES = ("coordinator", "proto")  # what the Python API consists of
INNER = "engine"  # what it looks at models with; asked for by files of ours alone


def _root() -> Path:
    """Return the folder that holds `proto`, `engine`, `models` and the others.

    A wheel has them in a folder of this package (`setup.py`); in a checkout they lie beside it.
    """
    package = Path(__file__).resolve().parent
    installed = package / "_root"
    return installed if installed.is_dir() else package.parent


ROOT = _root()


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
        is_ours = path is None and (name in NAMES or (name == INNER and _is_asked_by_us()))
        return PathFinder.find_spec(name, [str(ROOT)], target) if is_ours else None


def _is_asked_by_us() -> bool:
    """True if the import that is going on stands in a file of these packages."""
    frame = sys._getframe(2)
    while "importlib" in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return any((ROOT / name) in path.parents for name in (*NAMES, INNER))


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
