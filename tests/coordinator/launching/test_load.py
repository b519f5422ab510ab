"""The load by others: what our own processes compute is not in it, also after they have ended."""

import subprocess
import sys

from coordinator.launching.load import _own_s

COMPUTES = "import time\nwhile time.process_time() < 0.3: pass"


def test_a_process_of_ours_that_has_ended_is_none_of_others() -> None:
    before = sum(_own_s().values())
    subprocess.run([sys.executable, "-c", COMPUTES], check=True)
    assert sum(_own_s().values()) - before >= 0.28


def test_one_that_still_runs_is_counted_once() -> None:
    before = sum(_own_s().values())
    with subprocess.Popen(
        [sys.executable, "-c", COMPUTES + "\nprint(flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = sum(_own_s().values()) - before
        child.communicate(b"\n")
    ended = sum(_own_s().values()) - before
    assert 0.28 <= running <= ended < running + 0.2
