"""Makes `import slipstream` and the command `slipstream` work in an environment, from any folder.

    python -m slipstream.linking

Run it in the root, with the environment's own Python. It makes a link to this package in the
environment's site-packages, and a script of a few lines beside its `python`. It needs no network
and only the standard library. No other package of the repository becomes visible (docs/adr/0001).
"""

import os
import sys
import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# The first lines are valid for a shell and for Python, because the path of an interpreter after
# `#!` must be short and have no spaces.
SCRIPT = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
from slipstream.command import main

raise SystemExit(main())
"""


def link(python: Path, packages: Path, scripts: Path) -> None:
    """Make or renew the link to this package and the script of the command.

    If the environment lies in the repository, the link is relative: after the repository is moved
    or copied, the link still leads to its package. A broken link would stop programs that walk a
    folder, such as `ray up`.

    python    the environment's interpreter
    packages  its site-packages
    scripts   its folder of commands

    Raises OSError, also where there is another package with this name.
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
    """Link the package in the environment of the Python that runs this; return the exit status."""
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
