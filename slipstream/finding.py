"""Where the rest of Slipstream lies, and how a program in any folder finds the packages it needs.

`import slipstream` changes nothing for anybody else. Only when a name of the API is used for the
first time (`claim_names`) a finder is put in front of all others. From then on `coordinator` and
`proto` are ours in this process. The finder answers for `engine` only where code of ours asks: a
program that starts no models may have a module of that name.

`sys.path` stays as it is: with the root in front a program's own `models`, `engine` or `tests`
would be ours, and with the root at the end our `proto` would be that of the distribution
proto-plus, where there is one.
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


def claim_names() -> None:
    """Make the packages in NAMES importable, and ours, from now on. May be called again.

    Raises ImportError if this process has imported another package of one of these names. Then
    nothing is changed.
    """
    for name in NAMES:
        loaded = sys.modules.get(name)
        if loaded is None:
            continue
        folders = [Path(folder).resolve() for folder in getattr(loaded, "__path__", ())]
        if ROOT / name not in folders:
            where = folders[0] if folders else getattr(loaded, "__file__", "somewhere")
            raise ImportError(_line_about(name, str(where)))
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


def _line_about(name: str, where: str) -> str:
    """Return why Slipstream cannot be used in this process, and what to do."""
    owner = "the distribution proto-plus" if name == "proto" else "another package or module"
    return (
        f"Slipstream has a package named {name!r}, and this process has already imported {owner} "
        f"under that name, from {where}. One process can have only one of them: use Slipstream in "
        "a process of its own"
    )
