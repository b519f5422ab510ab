"""The rows of an experiment: one for each generated text, kept in a file as they are made.

A *cell* is one arm on one prompt in one repetition; it makes a row for each of its texts and turns.
The rows of a cell are written at once, and each states how many there are. After a crash a cell
with missing rows is measured again, and an incomplete last line is cut off.
"""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote_plus

from coordinator.text.metrics import MOST_LATE, Metrics, late_share
from lab.records import NO_OTHERS, from_json
from proto.errors import ConfigurationError, OutputError
from proto.system import cannot_read, cannot_write

Kind = TypeVar("Kind")  # the class of the rows in a file
KEPT_IN_FILE_NAMES = "=,"  # besides letters, digits and what URLs keep: `-`, `.`, `_` and `~`


class Key(NamedTuple):
    """Identifies a cell: one arm on one prompt in one repetition."""

    arm: str
    prompt: int
    repetition: int
    stage: str = "main"  # or "sweep": a run that looks for the best setting of an arm


@dataclass(frozen=True, slots=True)
class Row:
    """One generated text. Times are in seconds or milliseconds, as the names say.

    arm, prompt, repetition, stage  the cell
    num_rows           number of rows of the cell
    number             how many cells were run before this one
    turn, text         index of the turn in the conversation; index of the text among those that
                       are generated at the same time
    prompt_id, category  as the file of prompts states them; empty: it has none
    at                 when it began, UTC
    num_cell_tokens, wall_s  tokens of all texts that were generated at the same time, and the time
                       from the start of the first to the end of the last
    tokens_per_second  num_cell_tokens / wall_s; under `without_prompt` both without the first
                       tokens of each text and the time until the first of all
    ttft_s             time to the first token
    itl_p50_ms, itl_p99_ms  time from one arrival of tokens to the next: median, 99th percentile;
                       the tokens of one pass arrive together, and count as one arrival
    accept_lengths     number of tokens of each target pass
    accepted_by_source number of accepted drafts, by who drafted them
    num_bytes          bytes of all frames of the cell in both directions, without heartbeats
    figures            the fields of `Metrics`; None for a peer
    hosts              where the nodes ran, by role
    load               CPU cores that other processes used meanwhile
    void               why the figures must not be used; empty: they are good
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
        """Return the key of the row's cell."""
        return Key(self.arm, self.prompt, self.repetition, self.stage)


def as_line(row: Row) -> str:
    """Return the row as a line of JSON, with its line break."""
    return json.dumps(dataclasses.asdict(row), separators=(",", ":")) + "\n"


def from_line(line: str) -> Row:
    """Return the row that a line of JSON states. Raises ValueError."""
    row = from_json(Row, line)
    if row.figures is not None:
        from_json(Metrics, json.dumps(row.figures))  # checked here because the tables need them
    return row


def complete(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of those cells that have all their rows, each row once."""
    by_place = {(row.key, row.turn, row.text): row for row in rows}
    number = Counter(key for key, _, _ in by_place)
    return [row for row in by_place.values() if number[row.key] == row.num_rows]


class RowFile:
    """The file with the rows of an experiment. Only one process writes at a time (`Folder`)."""

    def __init__(self, path: Path) -> None:
        """Read the rows of complete cells; an unfinished last line is ignored.

        Raises ConfigurationError.
        """
        self._path = path
        lines = lines_of(path, from_line)
        self.rows = complete(row for _, row in lines)
        self._length = lines[-1][0] if lines else 0  # bytes up to the end of the last whole line

    def append(self, rows: Sequence[Row]) -> None:
        """Write the rows of a cell to the file, all or none. Raises OutputError."""
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
    """Return the rows of the complete cells in a file. Raises ConfigurationError."""
    return complete(row for _, row in lines_of(path, from_line))


def lines_of(path: Path, read_line: Callable[[str], Kind]) -> list[tuple[int, Kind]]:
    """Parse every line of a file; return (byte offset of the line's end, row) for each.

    A last line without a line break was cut off, and is left out. A missing file has no lines.
    Raises ConfigurationError.

    read_line  parses a line; raises ValueError if the line is no row
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
    """True if the row is void, or its forwards ended noticeably later than the simulated device."""
    times = times_of(row)
    return bool(row.void) or (times is not None and late_share([times]) > MOST_LATE)


def times_of(row: Row) -> tuple[float, float] | None:
    """Return (ms by which the row's forwards were late, ms that the text took), or None.

    None: no device was simulated.
    """
    simulated: Mapping[str, float] | None = (row.figures or {}).get("simulated")
    return None if simulated is None else (simulated["late_ms"], simulated["elapsed_ms"])


def file_name(arm: str) -> str:
    """Return the name of an arm as a file name without suffix; no two names share a file name.

    Letters and digits of all languages stay as they are. A space becomes `+`, and other characters
    are escaped as in a URL, because to write one character for all of them would make names equal.
    """
    return "".join(
        letter if letter.isalnum() else quote_plus(letter, safe=KEPT_IN_FILE_NAMES)
        for letter in arm
    )
