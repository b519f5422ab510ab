"""What a GPU still computes when its process is to end: that is waited for, within a limit.

Two processes on one GPU are clients of one service (MPS), and one that ends in the middle of a
kernel may take the other with it. So the thread that ends a process lets what was launched come to
its end, and whoever would launch more waits for the end of the process instead. A process without
a GPU has nothing to wait for.

Imports nothing that takes time: whoever ends a process so loads it before all else.
"""

import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 0.7  # who started the process insists after one second

_is_ending = threading.Event()
_is_launching = threading.Event()  # kernel by kernel, or what follows from them is not there yet
_waits: "list[Callable[[], object]]" = []


def wait_at_end(wait: "Callable[[], object]") -> None:
    """From now on `finish` calls this, which returns when the device has nothing left to do."""
    _waits.append(wait)


def begin() -> None:
    """Whoever launches work on the device asks first: while the process ends this never returns."""
    while _is_ending.is_set():
        time.sleep(1.0)
    _is_launching.set()


def end() -> None:
    """What `begin` began is done."""
    _is_launching.clear()


def finish(limit_s: float = LIMIT_S) -> bool:
    """Let the device end what it was given; False: it did not within the limit. Never raises."""
    if not _waits:
        return True
    _is_ending.set()
    ended = threading.Event()

    def wait() -> None:
        while _is_launching.is_set():
            time.sleep(0.001)
        for one in _waits:
            one()
        ended.set()

    # An error there is one of the device, and then nothing runs on it any more.
    threading.Thread(target=wait, name="last forward", daemon=True).start()
    return ended.wait(limit_s)
