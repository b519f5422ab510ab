"""`python -m engine.tensor_parallel`: a follower, started by rank 0, with calls on its stdin.

An error is printed as one line on standard output, which rank 0 reads.
"""

import signal

if __name__ == "__main__":
    # Ctrl-C reaches the whole process group; rank 0 decides when its followers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import ctypes
import os
import select
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from engine import running
from engine.tensor_parallel.calls import FAILED, UNUSABLE, Start
from engine.tensor_parallel.silence import BEAT_S

PARENT_CHECK_S = 0.5
LIFELINE_LIMIT_S = 5.0
PR_SET_PDEATHSIG = 1


def main() -> int:
    """Follow rank 0 until it ends; returns the exit status."""
    if sys.stdin is None or sys.stdin.isatty():
        sys.stdout.write("error: a rank is started by the process of its model, not by hand\n")
        return UNUSABLE
    # A process that is stopped does not see that its lifeline is closed. The kernel watches the
    # thread that has started this one: it is the one that runs rank 0's model.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    channel = Connection(0, writable=False)
    try:
        start: Start = channel.recv()
    except (EOFError, OSError):
        return 0  # rank 0 has gone before it said anything
    watch = threading.Thread(
        target=_end_with_parent, args=(start.parent_pid,), name="lifeline", daemon=True
    )
    watch.start()
    threading.Thread(target=_beat, name="heartbeat", daemon=True).start()
    try:
        return _follow(start, channel)
    finally:
        running.finish()


def _follow(start: Start, channel: Connection) -> int:
    """Load this rank's part and execute rank 0's calls until the channel closes.

    Returns the exit status.
    """
    # What follows takes seconds: by now the lifeline holds.
    from engine.checkpoint.files import one_line
    from engine.errors import EngineError, ModelError, RankError
    from engine.tensor_parallel.follower import follow

    try:
        follow(start, channel)
    except RankError as error:
        time.sleep(LIFELINE_LIMIT_S)  # whoever is to blame is named by rank 0, which ends this one
        return _say(str(error), FAILED)
    except ModelError as error:
        return _say(f"cannot go on: {error}", UNUSABLE)
    except (EngineError, RuntimeError, OSError, ValueError) as error:
        return _say(f"cannot go on: {one_line(error)}", FAILED)
    return 0


def _say(line: str, status: int) -> int:
    """Print a line for rank 0, and return `status`."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    return status


def _beat() -> None:
    """Write an empty line every BEAT_S seconds for ever: the heartbeat that rank 0 waits for."""
    with suppress(OSError):  # rank 0 has gone
        while True:
            os.write(1, b"\n")
            time.sleep(BEAT_S)


def _end_with_parent(pid: int) -> None:
    """End this process when the other end of the channel closes, also in the middle of a pass.

    Waits first, within a limit, until its GPU has finished (`engine/running.py`), as on rank 0.
    """
    lifeline = select.poll()
    lifeline.register(0, 0)  # no input events: only a hang-up wakes the poll
    while os.getppid() == pid:
        if lifeline.poll(PARENT_CHECK_S * 1000):
            break
    running.finish()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
