"""How a signal ends a node that was started by hand: at once, with a line and status 0.

Not by an exception. One that is raised inside an import may be swallowed there (an import has
callbacks whose errors nobody hears), and then the node would go on for ever. Nothing has to be
tidied up: the system closes the node's connections, which its coordinator notices, and the pipes
to the other ranks of its model, which end with it.

This file is loaded before all others, so it imports nothing that takes time. Pythons that are too
old for the rest read it too (`proto/installation.py`).
"""

import atexit
import contextlib
import os
import signal
from types import FrameType
from typing import NoReturn

from engine import leftovers

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once_on_signals(role: str) -> None:
    """From now on a signal ends the process at once, with its line.

    One that is ignored, as under nohup, stays ignored.
    """

    def end(number: int, _frame: "FrameType | None") -> NoReturn:
        # Not through sys.stderr: this may have interrupted whoever writes to it.
        with contextlib.suppress(OSError):
            os.write(2, f"{role}: {_how(number)}\n".encode())
        leftovers.remove()
        os._exit(0)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    # Where the node ends by itself, it has said why; Python takes its handlers away before it ends.
    atexit.register(_ignore_signals)


def _how(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def _ignore_signals() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
