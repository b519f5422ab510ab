"""Ctrl-C where several texts are written: once finishes those that run, twice ends now."""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType

from coordinator.api.batch import Batch

WAITS = "interrupted: no more texts are begun; {} are finished first (Ctrl-C again ends now)"


class WindingUp:
    """Has Ctrl-C while it is entered. Where one text runs, whoever had it before has it."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._before = signal.getsignal(signal.SIGINT)
        # Under nohup it is ignored and stays so; other threads cannot have it.
        in_main = threading.current_thread() is threading.main_thread()
        self._is_ours = in_main and callable(self._before)

    def __enter__(self) -> "WindingUp":
        if self._is_ours:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_ours and signal.getsignal(signal.SIGINT) == self._on_signal:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._batch.num_open > 1 and not self._batch.is_winding_up:
            self._batch.wind_up()
            line = WAITS.format(f"{self._batch.num_open} texts") + "\n"
            start = "\n" if sys.stderr is not None and sys.stderr.isatty() else ""
            with suppress(OSError):
                # Not through sys.stderr: this may have interrupted whoever writes to it.
                os.write(2, (start + line).encode())
        elif callable(self._before):
            self._before(number, frame)
