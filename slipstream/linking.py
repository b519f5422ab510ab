"""Makes `import slipstream` and the command `slipstream` work in an environment, from any folder.

    python -m slipstream.linking

from the root, with the environment's own Python: a link to this package in its site-packages, and a
script of a few lines beside its `python`. Needs no network, and nothing but the standard library.
Nothing else of the repository is seen from there (docs/adr/0001).
"""

import os
import sys
import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# The first lines are a shell's as well: the path of an interpreter in `#!` may neither be long nor
# have spaces.
SCRIPT = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
from slipstream.command import main

raise SystemExit(main())
"""


def link(python: Path, packages: Path, scripts: Path) -> None:
    """Make or renew both.

    The link names the way from here to there where the environment lies in the repository: if that
    is moved or copied, the link leads to the package that has come along. What walks a folder may
    stop at a link that leads nowhere, as `ray up` does.

    python    the environment's interpreter
    packages  its site-packages
    scripts   its folder of commands

    Raises OSError, also where there is another package of that name.
    """
    place = packages / PACKAGE.name
    if place.is_symlink():
        place.unlink()
    is_inside = packages.resolve().is_relative_to(PACKAGE.parent)
    way = os.path.relpath(PACKAGE, packages.resolve()) if is_inside else PACKAGE
    place.symlink_to(way, target_is_directory=True)
    command = scripts / PACKAGE.name
    command.write_text(SCRIPT.format(python=python), encoding="utf-8")
    command.chmod(0o755)


def main() -> int:
    """Do it in the environment of the Python that runs this; returns the exit status."""
    if sys.prefix == sys.base_prefix:
        sys.stderr.write("this Python is of no virtual environment: make one with `make setup`\n")
        return 1
    paths = sysconfig.get_paths()
    try:
        link(Path(sys.executable), Path(paths["purelib"]), Path(paths["scripts"]))
    except OSError as error:
        sys.stderr.write(f"cannot link slipstream into {sys.prefix}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
