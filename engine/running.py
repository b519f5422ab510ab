"""Before a process ends, wait (up to a limit) until its GPU has finished what was launched.

Two processes on one GPU are clients of one service (MPS), and a process that ends in the middle of
a kernel may crash the other. So the thread that ends the process waits until the launched work is
done (`finish`), and a thread that wants to launch more work blocks for ever (`begin`). A process
without a GPU has nothing to wait for.

Imports nothing slow, because the code that ends a process loads this module before all else.
"""

import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 0.7  # the launcher kills the process after one second

_is_ending = threading.Event()
_is_launching = False  # between `begin` and `end`: work is launched or not yet done
_waits: "list[Callable[[], object]]" = []


def wait_at_end(wait: "Callable[[], object]") -> None:
    """Register `wait`, which `finish` calls; it must block until the device is idle."""
    _waits.append(wait)


def begin() -> None:
    """Mark the start of launching work on the device; never returns if the process is ending."""
    global _is_launching
    while _is_ending.is_set():
        time.sleep(1.0)
    _is_launching = True


def end() -> None:
    """Mark the end of the launching that `begin` started."""
    global _is_launching
    _is_launching = False


def finish(limit_s: float = LIMIT_S) -> bool:
    """Block launches and wait until the device is idle; True if it is within `limit_s` seconds.

    Returns True if the device is idle, or there is none; False if the limit passed. Never raises.
    """
    if not _waits:
        return True
    _is_ending.set()
    ended = threading.Event()

    def wait() -> None:
        while _is_launching:
            time.sleep(0.001)
        for one in _waits:
            one()
        ended.set()

    # If a wait raises, the device has failed and runs nothing any more.
    threading.Thread(target=wait, name="last forward", daemon=True).start()
    return ended.wait(limit_s)
