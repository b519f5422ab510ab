"""Too little memory for connections is told before there are any: ZeroMQ would end the process."""

import resource
import subprocess
import sys

from proto.system import check_spare
from tests.programs import ROOT

CHECKS = """
import resource, sys
from pathlib import Path
from proto.system import SPARE_BYTES, check_spare
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
for more in (SPARE_BYTES // 2, 2 * SPARE_BYTES):
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
    try:
        check_spare()
    except MemoryError as error:
        print(error)
    else:
        print("enough")
"""


def test_a_limit_that_leaves_too_little_is_told_with_what_to_raise() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECKS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "too little memory is left for connections; raise the limit (`ulimit -v`)",
        "enough",
    ]


def test_without_a_limit_nothing_is_asked_for() -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    check_spare()
