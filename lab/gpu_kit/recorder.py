"""The rows of a run on disk, each as soon as it is there.

A step writes a row for each of its cells, and a last one when it has ended well. So a crash or a
time-out loses the cell that was being measured and nothing else: what has a row is not measured
again, and a line that was cut off is cut away.
"""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from lab.experiments.rows import lines_of
from lab.gpu_kit.rows import Figure, KitRow, State, as_line, from_line
from proto.errors import OutputError
from proto.system import cannot_write

FILE = "rows.jsonl"


def read(path: Path) -> list[KitRow]:
    """The rows of a file, without a last line that was cut off. Raises ConfigurationError."""
    return [row for _, row in lines_of(path, from_line)]


class Recorder:
    """Where a step writes its rows. One process writes at a time."""

    def __init__(self, path: Path, step: str, machine: str = "") -> None:
        """Read what is there, and cut away what was not finished. Raises ConfigurationError."""
        self._path, self._step, self._machine = path, step, machine
        lines = lines_of(path, from_line)
        end = lines[-1][0] if lines else 0
        if path.exists() and path.stat().st_size > end:
            os.truncate(path, end)
        self._measured = {row.cell: row for _, row in lines if row.step == step and row.cell}

    def has(self, cell: str) -> bool:
        """Whether it was measured before: what failed is tried again."""
        row = self._measured.get(cell)
        return row is not None and row.state == "measured"

    def measured(self, cell: str, /, **figures: Figure) -> None:
        """Raises OutputError."""
        self._append(cell, "measured", figures)

    def failed(self, cell: str, note: str) -> None:
        """Raises OutputError."""
        self._append(cell, "failed", note=note)

    def skipped(self, cell: str, note: str) -> None:
        """Raises OutputError."""
        self._append(cell, "skipped", note=note)

    def done(self, took_s: float) -> None:
        """The step has ended well. Raises OutputError."""
        self._append("", "done", {"took_s": round(took_s, 1)})

    def _append(
        self, cell: str, state: State, figures: Mapping[str, Figure] | None = None, note: str = ""
    ) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        row = KitRow(self._step, cell, state, figures or {}, note, at, self._machine)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(as_line(row))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {cannot_write(error)}") from error
        if cell:
            self._measured[cell] = row
