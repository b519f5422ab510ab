"""A program at a terminal of its own, and somebody who types there."""

import fcntl
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from tests.process.test_faults import ROOT, alive, children

LIMIT_S = 60.0


class AtTerminal:
    """The program. `shown` is all that it has written, echoes of what was typed included."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        """folder: for its temporary files."""
        self._mine, its_end = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            # No colours, nothing that moves, and lines as they are.
            env={**os.environ, "TERM": "dumb", "TMPDIR": str(folder)},
            stdin=its_end,
            stdout=its_end,
            stderr=its_end,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(its_end)
        self._nodes: list[int] = []

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._mine, text.encode())

    def wait_for(self, words: str, start: int = 0) -> int:
        """Until the words show behind `start`; returns where they end."""
        deadline = time.monotonic() + LIMIT_S
        while words not in self.shown[start:]:
            assert self._read(deadline), f"{words!r} does not show: {self.shown[start:]!r}"
        self._nodes = children(self.process.pid) or self._nodes
        return self.shown.index(words, start) + len(words)

    def wait_for_more(self, start: int) -> None:
        """Until something shows behind `start`."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.shown) <= start:
            assert self._read(deadline), "nothing more shows"

    def _read(self, deadline: float) -> bool:
        """Whether more has come."""
        ready, _, _ = select.select([self._mine], [], [], max(0.0, deadline - time.monotonic()))
        try:
            read = os.read(self._mine, 1 << 16).decode(errors="replace") if ready else ""
        except OSError:  # the other end is closed
            read = ""
        self.shown += read
        return read != ""

    def end(self) -> int:
        """Its exit status, after all that it still writes."""
        deadline = time.monotonic() + LIMIT_S
        while self._read(deadline):
            pass
        return self.process.wait(LIMIT_S)

    @property
    def nodes(self) -> list[int]:
        """Its processes, as they were when something was last waited for."""
        return self._nodes

    def kill(self) -> None:
        """See that it has ended, and give the terminal back."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        os.close(self._mine)

    def left(self) -> list[int]:
        """Those of its processes that are alive."""
        return [pid for pid in self._nodes if alive(pid)]
