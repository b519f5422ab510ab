"""Workers of one run take turns: what depends on time runs while no other worker runs a test.

Two locks on files: every test takes `gate` and then `room`, and gives `gate` back at once. Who must
be alone takes `room` for itself, and keeps `gate` until it has ended, so that nobody overtakes it.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Turns:
    """The two locks of a run, opened by each worker for itself; none if `run`, its name, is ""."""

    def __init__(self, run: str) -> None:
        folder = Path(tempfile.gettempdir())
        names = ("gate", "room") if run else ()
        self._paths = [folder / f"slipstream-tests-{run}.{name}" for name in names]
        self._locks = [os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for path in self._paths]

    @contextmanager
    def turn(self, *, is_alone: bool) -> Iterator[None]:
        """Run a test inside; alone: when all others have ended, and before the next ones begin."""
        if not self._locks:
            yield
            return
        gate, room = self._locks
        fcntl.flock(gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
            if not is_alone:
                fcntl.flock(gate, fcntl.LOCK_UN)
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)
            fcntl.flock(gate, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the locks at the end of the run."""
        for lock in self._locks:
            os.close(lock)
        for path in self._paths:
            with suppress(FileNotFoundError):
                path.unlink()
        self._locks, self._paths = [], []
