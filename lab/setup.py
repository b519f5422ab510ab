"""Which packages and files the lab's wheel has; everything else about it is in pyproject.toml.

The wheel puts all files into `slipstream/_root/lab`, where the product's wheel has its own packages
(docs/adr/0001). An editable install needs none of them: the product finds them in the checkout.
"""

import sys
import tempfile
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
INSIDE = "slipstream._root.lab"
# Files that are read when the program runs, by the ending of their names.
DATA = ["*.toml", "*.jsonl", "*.txt", "*.j2"]

# What setuptools is asked for when pip installs with -e.
IS_EDITABLE = "editable_wheel" in sys.argv
FOUND = [] if IS_EDITABLE else [f"{INSIDE}.{name}" for name in find_packages(str(HERE))]

# The build goes to a new folder: in that of an earlier build lie files that the lab has no more.
with tempfile.TemporaryDirectory() as fresh:
    setup(
        script_name="setup.py",  # by this name setuptools leaves this file out of the wheel
        packages=[] if IS_EDITABLE else [INSIDE, *FOUND],
        package_dir={} if IS_EDITABLE else {INSIDE: "."},
        package_data=dict.fromkeys(FOUND, DATA),  # the lab's own pyproject.toml is none of it
        include_package_data=False,
        options={"build": {"build_base": fresh}, "egg_info": {"egg_base": fresh}},
    )
