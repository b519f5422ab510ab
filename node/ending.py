"""How a signal ends a node that was started by hand: at once, with a line and status 0.

Not by an exception. One that is raised inside an import may be swallowed there (an import has
callbacks whose errors nobody hears), and then the node would go on for ever. Nothing has to be
tidied up: the system closes the node's connections, which its coordinator notices, and the pipes
to the other ranks of its model, which end with it. And not only in the main thread: it may be in a
library that waits for a rank that does not answer, and then Python runs no handler.

This file is loaded before all others, so it imports nothing that takes time. Pythons that are too
old for the rest read it too (`proto/installation.py`).
"""

import atexit
import contextlib
import os
import signal
import threading
from types import FrameType

from engine import leftovers, running

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once_on_signals(role: str) -> None:
    """From now on a signal ends the process at once, with its line.

    One that is ignored, as under nohup, stays ignored.
    """

    ending = threading.Lock()

    def end(number: int, _frame: "FrameType | None") -> None:
        if not ending.acquire(blocking=False):
            return  # the other thread is at it
        # Not through sys.stderr: this may have interrupted whoever writes to it.
        with contextlib.suppress(OSError):
            os.write(2, f"{role}: {_how(number)}\n".encode())
        leftovers.remove()
        running.finish()
        os._exit(0)

    def watch() -> None:
        """End the process also where the main thread does not come back to Python."""
        number = 0
        while number not in ENDING:
            number = os.read(reading, 1)[0]
        end(number, None)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="signals", daemon=True).start()
    # Where the node ends by itself, it has said why; Python takes its handlers away before it ends.
    atexit.register(_ignore_signals)


def _how(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def _ignore_signals() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
