"""The rows of a run of the GPU kit: one for each thing that was measured (pure)."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lab.records import NO_OTHERS, from_json

State = Literal["measured", "failed", "skipped", "done"]
Figure = float | str


@dataclass(frozen=True, slots=True)
class KitRow:
    """The result of one cell (one thing that a step measures), or of a step as a whole.

    cell     its name; `row|column` for a place in a table of two dimensions; empty: the whole step
    state    failed or skipped: `note` says why; done (only of a step): it has ended well
    figures  numbers and words by name; a name ends with the unit
    at       when it was written, UTC
    machine  name of the machine, made by `steps/versions.py`; empty: not known
    """

    __pydantic_config__ = NO_OTHERS
    step: str
    cell: str
    state: State
    figures: Mapping[str, Figure] = field(default_factory=dict)
    note: str = ""
    at: str = ""
    machine: str = ""


def as_line(row: KitRow) -> str:
    """Return the row as a line of JSON, with its line break."""
    return json.dumps(dataclasses.asdict(row), separators=(",", ":")) + "\n"


def from_line(line: str) -> KitRow:
    """Return the row that a line of JSON states. Raises ValueError."""
    return from_json(KitRow, line)


def latest(rows: Iterable[KitRow]) -> list[KitRow]:
    """Return the last row of each cell, in the order in which the cells first appear."""
    by_cell: dict[tuple[str, str], KitRow] = {}
    for row in rows:
        by_cell[row.step, row.cell] = row
    return list(by_cell.values())
