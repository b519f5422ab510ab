"""The command line's process: signals, lack of memory, standard streams.

A signal ends the process with a line and the exit status that shells know (128 plus its number).
While the program is imported and after its work is done, it ends at once; in between a signal
raises KeyboardInterrupt, because nodes have to be ended first. This file is loaded before all
others, so it imports only modules that are small and quick to load. Pythons that are too old for
the rest must be able to read it (`installation.py`).
"""

import atexit
import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import NoReturn

from proto import memory

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_FAILED = 1
END_LIMIT_S = 15.0  # for the cleaning up after a signal; usually it takes less than one
SIGNALLED = 128  # plus the number of the signal: the exit status of a process that it ended
NO_MEMORY = (
    "error: there is too little memory for the coordinator, or no room for a thread; give it more, "
    "or raise its limits (`ulimit -v`, `ulimit -u`)\n"
)


def end_at_once_on_signals() -> None:
    """Let a signal end the process at once from now on, with a line on stderr.

    A signal that is ignored, as under nohup, stays ignored.
    """
    for number in _heeded():
        signal.signal(number, _end_at_once)
    # At its end Python removes signal handlers; then a late signal must do nothing.
    atexit.register(_ignore_signals)


def _heeded() -> "list[signal.Signals]":
    return [number for number in INTERRUPTS if signal.getsignal(number) is not signal.SIG_IGN]


def _end_at_once(number: int, _frame: "FrameType | None") -> NoReturn:
    # Not through sys.stderr: the signal may have interrupted code that writes to it.
    _write_error(_line_of(number) + "\n")
    os._exit(SIGNALLED + number)


def _line_of(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def _ignore_signals() -> None:
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


def _write_error(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


class Interruption:
    """In its `with` block the first signal raises KeyboardInterrupt; later ones are ignored.

    From then on the process has END_LIMIT_S seconds, whatever hangs in it: a library that keeps the
    interpreter, a thread that is waited for. Then the kernel ends it (SIGALRM). The nodes end with
    it, and the next start removes the folder that it leaves behind.
    """

    def __init__(self) -> None:
        self._number: int = signal.SIGINT  # the default, where a library raised KeyboardInterrupt

    @property
    def line(self) -> str:
        """Return the line for the user about the signal that has come."""
        return _line_of(self._number)

    @property
    def status(self) -> int:
        """Return the exit status of a process that the signal ends."""
        return SIGNALLED + self._number

    def __enter__(self) -> "Interruption":
        self._before = {number: signal.getsignal(number) for number in _heeded()}
        for number in self._before:
            signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self,
        kind: "type[BaseException] | None",
        error: "BaseException | None",
        trace: "TracebackType | None",
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)  # nothing hangs any more
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, _frame: "FrameType | None") -> NoReturn:
        self._number = number
        _ignore_signals()  # a second signal would interrupt the cleaning up
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, END_LIMIT_S)
        raise KeyboardInterrupt(self.line)


def leave(status: int) -> NoReturn:
    """End the process now, without waiting for threads that still work."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(status)


def prepare_streams() -> None:
    """Make the standard streams writable for any text.

    A closed stream is opened to /dev/null; otherwise a socket could get its number and receive
    what is printed. A character that the encoding lacks is replaced, unless the environment sets
    another error handler.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def lack_of_memory_said() -> "Iterator[None]":
    """While inside, an error that means lack of memory ends the process with a line on stderr."""
    try:
        yield
    except (MemoryError, ImportError, SyntaxError, OSError, RuntimeError, SystemError) as error:
        if not is_lack_of_memory(error):
            raise
    else:
        return
    _write_error(NO_MEMORY)
    sys.exit(EXIT_FAILED)


def is_lack_of_memory(error: BaseException) -> bool:
    """True if an error, or one of its causes, means that there is too little memory."""
    is_limited = memory.is_limited()
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or memory.is_lack_of_memory(str(seen)):
            return True
        # An import may fail in the middle for lack of memory, and then only this error is raised.
        if is_limited and isinstance(seen, (ImportError, SyntaxError)):
            return not isinstance(seen, ModuleNotFoundError)
        seen = seen.__cause__ or seen.__context__
    return False
