"""Lets a signal end a node that was started by hand: at once, with a line and exit status 0.

The node does not end by an exception: one that is raised inside an import may be swallowed there
(errors in an import's callbacks are ignored), and the node would go on for ever. Little has to be
tidied up (`engine/leftovers.py`): the system closes the node's connections, which its coordinator
notices, and the pipes to the other ranks of its model, which then end too. A second thread ends
it, and the main thread goes on meanwhile: it may be in the middle of a pass, to whose end the other
waits, or in a library that waits for a rank that does not answer, and then Python runs no handler.

This file is loaded before all others, so it imports nothing that takes time. Pythons that are too
old for the rest load it too (`proto/installation.py`).
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
    """End the process at once on SIGINT, SIGTERM or SIGHUP from now on, with a line on stderr.

    A signal that is ignored, as SIGHUP is under nohup, stays ignored.
    """

    def watch() -> None:
        """End the process on a signal even if the main thread never comes back to Python."""
        number = 0
        while number not in ENDING:
            number = os.read(reading, 1)[0]
        # Not through sys.stderr: the main thread may be writing to it.
        with contextlib.suppress(OSError):
            os.write(2, f"{role}: {_how(number)}\n".encode())
        leftovers.remove()
        running.finish()
        leftovers.end_processes()
        os._exit(0)

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _go_on)
    threading.Thread(target=watch, name="signals", daemon=True).start()
    # A node that ends by itself has said why. Python removes its handlers before it ends, and then
    # a signal would end the process with another status.
    atexit.register(_ignore_signals)


def _go_on(_number: int, _frame: "FrameType | None") -> None:
    """Handle a signal in the main thread: come to the end of a pass, for which the other waits."""


def _how(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def _ignore_signals() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
