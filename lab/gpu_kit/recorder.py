"""Stores the rows of a run of the kit on disk, each as soon as it is measured.

A step writes a row for each of its cells (things that it measures), and a last one when it has
ended well. So a crash or a time-out loses only the cell that was being measured. A cell with a row
is not measured again, and an incomplete last line is cut off.
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
    """Return a file's rows but a cut-off last line; [] if missing. Raises ConfigurationError."""
    return [row for _, row in lines_of(path, from_line)]


class Recorder:
    """Appends the rows of one step to the file. Only one process writes at a time."""

    def __init__(self, path: Path, step: str, machine: str = "") -> None:
        """Read the rows that exist and cut off an incomplete last line.

        Raises ConfigurationError.
        """
        self._path, self._step, self._machine = path, step, machine
        lines = lines_of(path, from_line)
        end = lines[-1][0] if lines else 0
        if path.exists() and path.stat().st_size > end:
            os.truncate(path, end)
        self._measured = {row.cell: row for _, row in lines if row.step == step and row.cell}

    def has(self, cell: str) -> bool:
        """True if this cell was measured before; a cell that failed was not, and is tried again."""
        row = self._measured.get(cell)
        return row is not None and row.state == "measured"

    def measured(self, cell: str, /, **figures: Figure) -> None:
        """Write the figures of a cell. Raises OutputError."""
        self._append(cell, "measured", figures)

    def failed(self, cell: str, note: str) -> None:
        """Write that a cell (or the step, for "") failed, and why. Raises OutputError."""
        self._append(cell, "failed", note=note)

    def skipped(self, cell: str, note: str) -> None:
        """Write that a cell (or the step, for "") was skipped, and why. Raises OutputError."""
        self._append(cell, "skipped", note=note)

    def done(self, took_s: float) -> None:
        """Write that the step has ended well after `took_s` seconds. Raises OutputError."""
        self._append("", "done", {"took_s": round(took_s, 1)})

    def _append(
        self, cell: str, state: State, figures: Mapping[str, Figure] | None = None, note: str = ""
    ) -> None:
        """Append one row and make sure that it is on the disk. Raises OutputError."""
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
