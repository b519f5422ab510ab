"""A program that prints what a process can see of itself, as JSON: whether it was forked or not.

    python -m tests.forking.shown STATUS

It reads one line from its standard input, and exits with STATUS. It writes a word to the descriptor
with the number in the variable SAID_TO, if there is one.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

READ_AT_LOAD = "OMP_NUM_THREADS"


def umask() -> int:
    """The umask of this process."""
    found = os.umask(0)
    os.umask(found)
    return found


if __name__ == "__main__":
    descriptors = os.listdir("/proc/self/fd")
    seen = {
        "argv": sys.argv[1:],
        "orig_argv": sys.orig_argv[1:],
        "name": __name__,
        "path": sys.path[0],
        "folder": os.getcwd(),
        "environment": dict(sorted(os.environ.items())),
        "temporary": tempfile.gettempdir(),
        "is_child": os.getppid() == int(os.environ["ASKED_BY"]),
        "leads_its_group": os.getpgrp() == os.getpid(),
        "leads_its_session": os.getsid(0) == os.getpid(),
        "handlers": [str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "cores": sorted(os.sched_getaffinity(0)),
        "umask": umask(),
        "descriptors": sorted(int(number) for number in descriptors if int(number) < 3),
        "num_descriptors": len(descriptors),
        "num_threads": len(os.listdir("/proc/self/task")),
        "streams": [
            (stream.encoding, stream.errors, stream.line_buffering, stream.seekable())
            for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "line": sys.stdin.readline(),
    }
    if number := os.environ.get("SAID_TO"):
        os.write(int(number), b"said")
    is_forked = Path("/proc/self/cmdline").read_text().split("\0")[2] != "tests.forking.shown"
    sys.stdout.write(json.dumps({"is_forked": is_forked, "seen": seen}) + "\n")
    sys.exit(int(sys.argv[1]))
