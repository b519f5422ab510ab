"""The tables of the report, made of rows (pure): what is in them, not how they look."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from deploy.gpu_kit.estimates import Compared, compare
from deploy.gpu_kit.plan import PLAN, Step
from deploy.gpu_kit.rows import Figure, Row, latest

NOTHING = "-"
COLUMN = "|"  # in the name of a cell
# Figures that are the same for every column, or say little in a table: not shown there.
SHOWN = {
    "attention": ("steady_us", "first_ms", "largest_error"),
    "passes-target": ("pass_ms", "first_ms"),
    "passes-drafter": ("pass_ms", "first_ms"),
    "choice": ("eager_ms", "captured_ms"),
}
TITLES = {
    "steady_us": "us of a call in a graph",
    "first_ms": "ms of the first in a shape",
    "largest_error": "largest error against float64",
    "pass_ms": "ms of a pass (median)",
    "eager_ms": "ms, as the engine does it",
    "captured_ms": "ms, as one CUDA graph",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; the first column names the line."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A step of the plan: what is said of it, its tables, and lines on what did not run."""

    title: str
    said: str
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = field(default=())


def sections(rows: Iterable[Row]) -> list[Section]:
    """Of every step, in the order of the plan."""
    last = latest(rows)
    by_step = {step.name: [row for row in last if row.step == step.name] for step in PLAN}
    return [_section(step, by_step[step.name]) for step in PLAN]


def _section(step: Step, rows: Sequence[Row]) -> Section:
    whole = next((row for row in rows if not row.cell), None)
    cells = [row for row in rows if row.cell]
    match whole:
        case None:
            said = "begun, not ended" if cells else "not run yet"
        case Row(state="done"):
            said = f"done in {number(whole.figures.get('took_s', 0.0))} s"
        case _:
            said = f"{whole.state}: {whole.note}"
    measured = [row for row in cells if row.state == "measured"]
    is_crossed = any(COLUMN in row.cell for row in measured)
    tables = tuple(_crossed(step, measured)) if is_crossed else tuple(_plain(measured))
    return Section(f"{step.part}. {step.title}", said, tables, tuple(_notes(cells)))


def _notes(cells: Sequence[Row]) -> Iterator[str]:
    """Why cells have no figures: a line per reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in cells:
        if row.state != "measured":
            reasons.setdefault((row.state, row.note), []).append(row.cell.replace(COLUMN, " "))
    for (state, note), names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more} {state}: {note}"


def _plain(rows: Sequence[Row]) -> Iterator[Table]:
    """A line per cell, a column per figure."""
    names = tuple(dict.fromkeys(name for row in rows for name in row.figures))
    if rows:
        lines = tuple(
            (row.cell, *(number(row.figures.get(name, NOTHING)) for name in names)) for row in rows
        )
        yield Table("", ("", *names), lines)


def _crossed(step: Step, rows: Sequence[Row]) -> Iterator[Table]:
    """A table per figure: what stands before the mark down, what stands behind it across."""
    down = tuple(dict.fromkeys(row.cell.partition(COLUMN)[0] for row in rows))
    across = tuple(dict.fromkeys(row.cell.partition(COLUMN)[2] for row in rows))
    by_cell = {row.cell: row.figures for row in rows}
    for name in SHOWN.get(step.name, tuple(rows[0].figures)):
        if not any(name in figures for figures in by_cell.values()):
            continue
        lines = tuple(
            (line, *(number(by_cell.get(f"{line}|{one}", {}).get(name, NOTHING)) for one in across))
            for line in down
        )
        kept = tuple(line for line in lines if set(line[1:]) != {NOTHING})
        yield Table(TITLES.get(name, name), ("", *across), kept)


def expectations(rows: Iterable[Row]) -> Table:
    """Every estimate beside what was measured."""
    lines = tuple(_expected(one) for one in compare(rows))
    return Table("", ("", "expected", "measured", "unit", "ratio"), lines)


def _expected(one: Compared) -> tuple[str, ...]:
    low, high = one.estimate.low, one.estimate.high
    expected = number(low) if low == high else f"{number(low)}-{number(high)}"
    measured = NOTHING if one.measured is None else number(one.measured)
    ratio = NOTHING if one.ratio is None else f"{one.ratio:.2f}"
    return one.estimate.what, expected, measured, one.estimate.unit, ratio


def number(value: Figure) -> str:
    """Three digits that say something; a text as it is."""
    if isinstance(value, str):
        return value
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{int(value)}"
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.1:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.01 else f"{value:.1e}"
