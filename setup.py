"""Which packages and files the wheel has; everything else about it stands in pyproject.toml.

In the wheel `slipstream` is the only name at the top. The other folders of the checkout lie in
`slipstream/_root`, because names such as `proto` and `models` belong to others too (docs/adr/0001).
`tests` is left out, and so is `lab`, which has a wheel of its own (lab/setup.py). An editable
install needs `slipstream` alone: it finds the others in the checkout.
"""

import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
INSIDE = "slipstream._root"
CODE = (
    *("proto", "engine", "node", "drafter_node", "target_node"),
    *("coordinator", "rehearsal", "deploy"),
)
# Files that are read when the program runs, by the ending of their names.
DATA = ("*.json", "*.yaml", "*.cpp", "*.h", "*.service")
PAGE = tuple(f"page/*.{ending}" for ending in ("html", "css", "js", "svg"))  # of the server


def layout() -> tuple[list[str], dict[str, str], dict[str, list[str]]]:
    """Names of packages, where each lies in the checkout, and its data files."""
    found = find_packages(str(HERE), include=[*CODE, *(f"{name}.*" for name in CODE)])
    models = sorted(path.parent.name for path in HERE.glob("models/*/config.json"))
    packages = [*(f"{INSIDE}.{name}" for name in found), f"{INSIDE}.models"]
    places = {f"{INSIDE}.{name}": name for name in (*CODE, "models")}
    data = {name: list(DATA) for name in packages}
    data[f"{INSIDE}.coordinator.http"] += PAGE
    data[f"{INSIDE}.models"] = ["README.md", *(f"{name}/*" for name in models)]
    return packages, places, data


class FreshBuild(build_py):
    """Copies the files of the wheel into a folder that is empty at first.

    In one that an earlier build has left, files lie that the checkout no longer has.
    """

    def run(self) -> None:
        """Called by setuptools."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


# What setuptools is asked for when pip installs with -e.
IS_EDITABLE = "editable_wheel" in sys.argv
PACKAGES, PLACES, FILES = ([], {}, {}) if IS_EDITABLE else layout()

setup(
    packages=["slipstream", *PACKAGES],
    package_dir=PLACES,
    package_data=FILES,
    include_package_data=False,
    cmdclass={"build_py": FreshBuild},
)
