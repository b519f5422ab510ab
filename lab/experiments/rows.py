"""The rows of an experiment: one per text that was generated, kept in a file as they are made.

A *cell* is one arm on one prompt in one repetition; it makes a row for each of its texts and turns.
The rows of a cell are written at once, and each says how many they are: after a crash a cell whose
rows are not all there is measured again, and a line that was cut off is cut away.
"""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from coordinator.text.metrics import MOST_LATE, Metrics, late_share
from lab.records import NO_OTHERS, from_json
from proto.errors import ConfigurationError, OutputError
from proto.system import cannot_read, cannot_write

Kind = TypeVar("Kind")  # of rows


class Key(NamedTuple):
    """Which cell."""

    arm: str
    prompt: int
    repetition: int
    stage: str = "main"  # or "sweep": to find the best setting of an arm


@dataclass(frozen=True, slots=True)
class Row:
    """One generated text. Seconds and milliseconds as the names say.

    arm, prompt, repetition, stage  the cell
    num_rows           of the cell
    number             how many cells came before this one, in the order in which they were run
    turn, text         which turn of a conversation; which of the texts that were written at once
    prompt_id, category  as the prompt set calls it; empty: it does not
    at                 when it began, UTC
    num_cell_tokens, wall_s  tokens of all texts of the cell that were written at once, and the time
                       from the start of the first to the end of the last
    tokens_per_second  the first through the second
    ttft_s             from the start to the first token
    itl_p50_ms, itl_p99_ms  between what a reader sees and what he saw before: tokens of one pass
                       come at once, and count once
    accept_lengths     tokens of each target pass
    accepted_by_source accepted drafts, by who drafted them
    num_bytes          of all frames of the cell but heartbeats, both ways
    figures            `Metrics` of the text; None: of a peer
    hosts              where the nodes ran, by role
    load               what others used meanwhile, in cores
    void               why the figures mean nothing; empty: they do
    """

    __pydantic_config__ = NO_OTHERS
    arm: str
    prompt: int
    repetition: int
    stage: str
    num_rows: int
    number: int
    turn: int
    text: int
    prompt_id: str
    category: str
    at: str
    seed: int
    num_prompt_tokens: int
    tokens: tuple[int, ...]
    num_cell_tokens: int
    wall_s: float
    tokens_per_second: float
    ttft_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    accept_lengths: tuple[int, ...]
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    figures: dict[str, Any] | None = None
    hosts: dict[str, str] = field(default_factory=dict)
    load: float = 0.0
    void: str = ""

    @property
    def key(self) -> Key:
        """Its cell."""
        return Key(self.arm, self.prompt, self.repetition, self.stage)


def as_line(row: Row) -> str:
    """A line of JSON."""
    return json.dumps(dataclasses.asdict(row), separators=(",", ":")) + "\n"


def from_line(line: str) -> Row:
    """Raises ValueError."""
    row = from_json(Row, line)
    if row.figures is not None:
        from_json(Metrics, json.dumps(row.figures))  # the tables are made of them
    return row


def complete(rows: Iterable[Row]) -> list[Row]:
    """Those of the cells that are all there, each once."""
    by_place = {(row.key, row.turn, row.text): row for row in rows}
    number = Counter(key for key, _, _ in by_place)
    return [row for row in by_place.values() if number[row.key] == row.num_rows]


class RowFile:
    """The rows on disk. One process writes at a time (`Folder`)."""

    def __init__(self, path: Path) -> None:
        """Read what is there, and cut away what was not finished. Raises ConfigurationError."""
        self._path = path
        lines = lines_of(path, from_line)
        self.rows = complete(row for _, row in lines)
        self._length = lines[-1][0] if lines else 0  # bytes that are whole lines

    def append(self, rows: Sequence[Row]) -> None:
        """The rows of a cell. Raises OutputError: nothing of it is there then."""
        data = "".join(map(as_line, rows)).encode()
        try:
            with self._path.open("ab") as file:
                file.truncate(self._length)
                file.seek(self._length)
                try:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(self._length)
                    raise
        except OSError as error:
            raise OutputError(
                f"cannot write {self._path}: {cannot_write(error)}; the same command goes on after "
                f"the {len(self.rows)} texts that are kept"
            ) from error
        self._length += len(data)
        self.rows += rows


def read(path: Path) -> list[Row]:
    """The rows of a file, those of complete cells. Raises ConfigurationError."""
    return complete(row for _, row in lines_of(path, from_line))


def lines_of(path: Path, read_line: Callable[[str], Kind]) -> list[tuple[int, Kind]]:
    """The rows of a file, each with where its line ends (bytes).

    A last line without its end was cut off, and is left out. Raises ConfigurationError.

    read_line  raises ValueError for a line that is none
    """
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {cannot_read(error)}") from error
    found: list[tuple[int, Kind]] = []
    end = 0
    *whole, _cut_off = data.split(b"\n")
    for line in whole:
        try:
            row = read_line(line.decode())
        except ValueError as error:
            raise ConfigurationError(
                f"{path} has a line that is no row after byte {end}; mend it, or choose another "
                "--out"
            ) from error
        end += len(line) + 1
        found.append((end, row))
    return found


def was_disturbed(row: Row) -> bool:
    """Whether its forwards took so much longer than the simulated device that it shows."""
    times = times_of(row)
    return bool(row.void) or (times is not None and late_share([times]) > MOST_LATE)


def times_of(row: Row) -> tuple[float, float] | None:
    """By how much its forwards were late, and in what time; None: nothing was simulated."""
    simulated: Mapping[str, float] | None = (row.figures or {}).get("simulated")
    return None if simulated is None else (simulated["late_ms"], simulated["elapsed_ms"])


def file_name(arm: str) -> str:
    """The name of an arm as that of a file, without its suffix."""
    return "".join(letter if letter.isalnum() or letter in "-=.," else "_" for letter in arm)
