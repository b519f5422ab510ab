"""The rows of a run of the kit: one per thing that was measured (pure)."""

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
    """What one cell of a step came to.

    cell     which; `row|column` where the report makes a table of two dimensions; empty: the step
    state    failed: `note` says why; skipped: so; done (of a step): it has ended well
    figures  by name, which ends with the unit
    at       UTC
    machine  what it was measured on, as `steps/versions.py` names it; empty: not known
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
    """A line of JSON."""
    return json.dumps(dataclasses.asdict(row), separators=(",", ":")) + "\n"


def from_line(line: str) -> KitRow:
    """Raises ValueError."""
    return from_json(KitRow, line)


def latest(rows: Iterable[KitRow]) -> list[KitRow]:
    """Of each cell the last row, in the order in which the cells first came."""
    by_cell: dict[tuple[str, str], KitRow] = {}
    for row in rows:
        by_cell[row.step, row.cell] = row
    return list(by_cell.values())
