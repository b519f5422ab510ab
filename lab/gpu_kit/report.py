"""The report of the GPU kit: as a self-contained HTML page, and as text of 80 columns (pure)."""

import html
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lab.gpu_kit.plan import PLAN, Step
from lab.gpu_kit.rows import Figure, KitRow, latest

# -- estimates -------------------------------------------------------------------------------------

# What was expected before anything had run on a GPU, for comparison with the measurements.
#
# Estimated from the code and the data sheet of an H200 (4.8 TB/s), with 2 us for a small kernel in
# a graph; right within about 25 %. They hold for no other GPU; `OTHERS` has estimates for some.


@dataclass(frozen=True, slots=True)
class Estimate:
    """One estimate, and where its measurement is found.

    what       words for what was estimated
    low, high  the range that was expected; equal: a single number
    step, cell, figure  the row of a step, and the name of the figure in it
    factor     multiplies the figure to give the unit of the estimate
    """

    what: str
    unit: str
    low: float
    high: float
    step: str
    cell: str
    figure: str
    factor: float = 1.0


ESTIMATES = (
    Estimate(
        "memory, read and written in a copy", "TB/s", 4.8, 4.8, "models", "copy", "GB_s", 1e-3
    ),
    Estimate(
        *("target pass, 1 row (8 B; floor 3.13)", "ms", 5.1, 5.1),
        *("passes-target", "graphs 500|1 row", "pass_ms"),
    ),
    Estimate(
        *("target pass, 9 rows, 500 tokens", "ms", 5.4, 5.4),
        *("passes-target", "graphs 500|9 rows", "pass_ms"),
    ),
    Estimate(
        *("target pass, 17 rows, 500 tokens", "ms", 5.7, 5.7),
        *("passes-target", "graphs 500|17 rows", "pass_ms"),
    ),
    Estimate(
        *("draft step (1 B; floor 0.51), host too", "ms", 1.5, 1.7),
        *("passes-drafter", "graphs 500|1 row", "pass_ms"),
    ),
    Estimate(
        *("target's host between passes", "ms", 0.0, 0.3),
        *("texts", "ar cuda:0 T=0.0", "host_ms"),
    ),
    Estimate(
        *("plain decoding, a token", "ms", 5.6, 6.2),
        *("texts", "ar cuda:0 T=0.0", "ms_per_token"),
    ),
    Estimate(
        *("sync over plain decoding, K = 4", "x", 1.2, 1.2),
        *("texts", "sync cuda:0 T=0.0", "speedup"),
    ),
)

# Estimates for models and machines that the kit does not measure.
OTHERS = (
    "Not measured here: a draft step of 0.6 B 1.6 ms and 0.3-0.5 of host and choice (floor 0.25). "
    "On an RTX 4090 the 8 B pass of 1 row takes 16.5 ms, and a 1 B step 3.0."
)


@dataclass(frozen=True, slots=True)
class Compared:
    """An estimate and its measurement (None: not measured)."""

    estimate: Estimate
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Return measured / expected: 1 within the expected range, None if not measured."""
        one, value = self.estimate, self.measured
        if value is None:
            return None
        nearest = min(max(value, one.low), one.high)
        return value / nearest


def compare(rows: Iterable[KitRow]) -> list[Compared]:
    """Return every estimate together with its measurement."""
    figures = {
        (row.step, row.cell, name): value
        for row in latest(rows)
        for name, value in row.figures.items()
    }
    found = []
    for one in ESTIMATES:
        value = figures.get((one.step, one.cell, one.figure))
        is_number = isinstance(value, int | float)
        found.append(Compared(one, value * one.factor if is_number else None))  # type: ignore[operator]
    return found


# -- tables ----------------------------------------------------------------------------------------

# The content of the report's tables, made from rows; how they look follows below.

NOTHING = "-"
COLUMN = "|"  # in the name of a cell: separates the row of a table from its column
# The figures that the tables of these steps show; steps that are not listed show all figures.
SHOWN = {
    "passes-target": ("pass_ms", "first_ms"),
    "passes-drafter": ("pass_ms", "first_ms"),
}
TITLES = {
    "first_ms": "ms of the first in a shape",
    "pass_ms": "ms of a pass (median)",
}


@dataclass(frozen=True, slots=True)
class Table:
    """The cells of a table as text; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """The section of the report about one step: its state, tables, and notes on missing figures."""

    title: str
    said: str
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = field(default=())


def sections(rows: Iterable[KitRow]) -> list[Section]:
    """Return a section for every step, in the order of the plan."""
    last = latest(rows)
    by_step = {step.name: [row for row in last if row.step == step.name] for step in PLAN}
    return [_section(step, by_step[step.name]) for step in PLAN]


def _section(step: Step, rows: Sequence[KitRow]) -> Section:
    """Return the section of one step from its rows."""
    whole = next((row for row in rows if not row.cell), None)
    cells = [row for row in rows if row.cell]
    match whole:
        case None:
            said = "begun, not ended" if cells else "not run yet"
        case KitRow(state="done"):
            said = f"done in {number(whole.figures.get('took_s', 0.0))} s"
        case _:
            said = f"{whole.state}: {whole.note}"
    measured = [row for row in cells if row.state == "measured"]
    is_crossed = any(COLUMN in row.cell for row in measured)
    tables = tuple(_crossed(step, measured)) if is_crossed else tuple(_plain(measured))
    return Section(f"{step.part}. {step.title}", said, tables, tuple(_notes(cells)))


def _notes(cells: Sequence[KitRow]) -> Iterator[str]:
    """Yield one line for each reason why cells have no figures."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in cells:
        if row.state != "measured":
            reasons.setdefault((row.state, row.note), []).append(row.cell.replace(COLUMN, " "))
    for (state, note), names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more} {state}: {note}"


def _plain(rows: Sequence[KitRow]) -> Iterator[Table]:
    """Yield one table with a row per cell and a column per figure; none without rows."""
    names = tuple(dict.fromkeys(name for row in rows for name in row.figures))
    if rows:
        lines = tuple(
            (row.cell, *(number(row.figures.get(name, NOTHING)) for name in names)) for row in rows
        )
        yield Table("", ("", *names), lines)


def _crossed(step: Step, rows: Sequence[KitRow]) -> Iterator[Table]:
    """Yield one table per figure; `row|column` in a cell's name is its place in the table."""
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


def expectations(rows: Iterable[KitRow]) -> Table:
    """Return the table with every estimate and its measurement."""
    lines = tuple(_expected(one) for one in compare(rows))
    return Table("", ("", "expected", "measured", "unit", "ratio"), lines)


def _expected(one: Compared) -> tuple[str, ...]:
    """Return the table row of one estimate: name, expected, measured, unit, ratio."""
    low, high = one.estimate.low, one.estimate.high
    expected = number(low) if low == high else f"{number(low)}-{number(high)}"
    measured = NOTHING if one.measured is None else number(one.measured)
    ratio = NOTHING if one.ratio is None else f"{one.ratio:.2f}"
    return one.estimate.what, expected, measured, one.estimate.unit, ratio


def number(value: Figure) -> str:
    """Return a number with about three significant digits; a text stays as it is."""
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


# -- report ----------------------------------------------------------------------------------------

WIDTH = 80
NAME_MOST = 40  # most characters of the first column
GAP = 2
TITLE = "What the GPU machine showed"
INTRO = (
    "Expected is what was estimated before anything had run on a GPU: for one H200, good for 25 %. "
    "A ratio above 1 is slower than expected where the unit is a time."
)
ON_GPU = "CUDA"  # in the name of a machine (`steps/versions.py`)
REHEARSAL = "A rehearsal on a CPU: its figures say nothing, but that all steps run."
STYLE = """
:root { color-scheme: light dark; --line: #8884; --faint: #777; --bad: #c33; --good: #285; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .2rem }
h3 { font-size: .9rem; font-weight: 600; margin: .9rem 0 .2rem }
p { margin: .2rem 0 .5rem } .said { color: var(--faint) } .failed { color: var(--bad) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .15rem .7rem; border-bottom: 1px solid var(--line); text-align: right }
td:first-child, th:first-child { text-align: left; padding-left: 0; min-width: 8rem }
.words :is(td, th) { text-align: left } td.text { overflow-wrap: anywhere }
th { font-weight: 600; font-size: .85rem }
ul { margin: .3rem 0; padding-left: 1.2rem } li { color: var(--faint) }
"""
_IS_NUMBER = re.compile(r"[-\d.,e+]+")


def machine_of(rows: Iterable[KitRow]) -> str:
    """Return the name of the machine that was measured; "" if nothing was."""
    return next((row.machine for row in rows if row.machine), "")


def is_rehearsal(rows: Iterable[KitRow]) -> bool:
    """True if the rows were measured without a GPU."""
    machine = machine_of(rows)
    return machine != "" and ON_GPU not in machine


def as_text(rows: Sequence[KitRow]) -> str:
    """Return the whole report as text in lines of at most 80 columns."""
    lines = [TITLE, "=" * len(TITLE), *_wrapped(machine_of(rows)), *_wrapped(_when(rows)), ""]
    lines += (
        _wrapped(REHEARSAL)
        if is_rehearsal(rows)
        else [
            *(*_wrapped(INTRO), ""),
            *_table(expectations(rows)),
            *("", *_wrapped(OTHERS)),
        ]
    )
    for section in sections(rows):
        lines += ["", section.title, "-" * len(section.title), *_wrapped(section.said)]
        for table in section.tables:
            lines += [""] + ([table.title] if table.title else [])
            lines += _table(table)
        if section.notes:
            lines += ["", *(line for note in section.notes for line in _wrapped(note, "* "))]
    return "\n".join(lines) + "\n"


def _when(rows: Sequence[KitRow]) -> str:
    """Return words for when the rows were measured (UTC)."""
    times = sorted(row.at for row in latest(rows) if row.at)
    return f"{times[0]} to {times[-1]}" if times else "nothing was measured yet"


def _wrapped(text: str, mark: str = "") -> list[str]:
    """Return the text in lines of at most 80 columns; the first begins with `mark`."""
    indent = " " * len(mark)
    return textwrap.wrap(text, WIDTH, initial_indent=mark, subsequent_indent=indent)


def _table(table: Table) -> Iterator[str]:
    """Yield the lines of a table; columns that do not fit follow below, with the row names."""
    widths = [
        max(len(line[index]) for line in (table.columns, *table.lines))
        for index in range(len(table.columns))
    ]
    if len(widths) == 2 and sum(widths) + GAP > WIDTH:
        yield from _pairs(table, widths[0])
        return
    first = min(widths[0], NAME_MOST)
    for chosen in _fitting(widths, first):
        lines = (table.columns, *table.lines)
        for line in lines:
            cells = [f"{line[index]:>{widths[index]}}" for index in chosen]
            yield (" " * GAP).join([f"{_cut(line[0], first):<{first}}", *cells])[:WIDTH].rstrip()


def _cut(name: str, width: int) -> str:
    """Return the name, cut to `width` characters."""
    return name if len(name) <= width else f"{name[: width - 3]}..."


def _fitting(widths: Sequence[int], first: int) -> Iterator[list[int]]:
    """Yield groups of column indices that fit into 80 columns beside the first column."""
    chosen: list[int] = []
    used = first
    for index in range(1, len(widths)):
        if chosen and used + GAP + widths[index] > WIDTH:
            yield chosen
            chosen, used = [], first
        chosen.append(index)
        used += GAP + widths[index]
    if chosen:
        yield chosen


def _pairs(table: Table, first: int) -> Iterator[str]:
    """Yield the lines of a table of names and long texts."""
    for name, value in table.lines:
        wrapped = textwrap.wrap(value, max(20, WIDTH - first - GAP)) or [""]
        for number, part in enumerate(wrapped):
            yield f"{name if number == 0 else '':<{first}}{' ' * GAP}{part}"[:WIDTH].rstrip()


def as_page(rows: Sequence[KitRow]) -> str:
    """Return the whole report as one HTML page without scripts or external files."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{TITLE}</title><style>{STYLE}</style>",
        f"<h1>{TITLE}</h1>",
        f"<p>{_safe(machine_of(rows))}</p>",
        f'<p class="said">{_safe(_when(rows))}</p>',
        *_html_expectations(rows),
        *(part for section in sections(rows) for part in _html_section(section)),
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _html_expectations(rows: Sequence[KitRow]) -> Iterator[str]:
    if is_rehearsal(rows):
        yield f"<p>{_safe(REHEARSAL)}</p>"
        return
    yield f"<h2>Expected and measured</h2><p>{_safe(INTRO)}</p>"
    yield _html_table(expectations(rows))
    yield f"<p>{_safe(OTHERS)}</p>"


def _html_section(section: Section) -> Iterator[str]:
    kind = "failed" if section.said.startswith("failed") else "said"
    yield f"<h2>{_safe(section.title)}</h2>"
    yield f'<p class="{kind}">{_safe(section.said)}</p>'
    for table in section.tables:
        if table.title:
            yield f"<h3>{_safe(table.title)}</h3>"
        yield _html_table(table)
    if section.notes:
        yield "<ul>" + "".join(f"<li>{_safe(note)}</li>" for note in section.notes) + "</ul>"


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{_safe(name)}</th>" for name in table.columns)
    lines = "".join(
        "<tr>" + "".join(_html_cell(cell) for cell in line) + "</tr>" for line in table.lines
    )
    kind = ' class="words"' if table.columns[1:] == ("value",) else ""
    return f'<div class="scroll"><table{kind}><tr>{head}</tr>{lines}</table></div>'


def _html_cell(text: str) -> str:
    kind = "" if _IS_NUMBER.fullmatch(text) else ' class="text"'
    return f"<td{kind}>{_safe(text)}</td>"


def _safe(text: str) -> str:
    """Return the text escaped for HTML."""
    return html.escape(text)
