"""The report: the same tables as a page that needs nothing else, and in 80 columns (pure)."""

import html
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from deploy.gpu_kit.rows import Row, latest
from deploy.gpu_kit.tables import Section, Table, expectations, sections

WIDTH = 80
NAME_MOST = 40  # columns of the first column
GAP = 2
TITLE = "What the GPU machine showed"
INTRO = (
    "Expected is what was estimated before anything had run on a GPU: for one H200, good for 30 %. "
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


def machine_of(rows: Iterable[Row]) -> str:
    """What was measured on; empty: nothing was."""
    return next((row.machine for row in rows if row.machine), "")


def is_rehearsal(rows: Iterable[Row]) -> bool:
    """Whether it was measured without a GPU."""
    machine = machine_of(rows)
    return machine != "" and ON_GPU not in machine


def as_text(rows: Sequence[Row]) -> str:
    """Everything in lines of at most 80 columns."""
    lines = [TITLE, "=" * len(TITLE), *_wrapped(machine_of(rows)), *_wrapped(_when(rows)), ""]
    lines += (
        _wrapped(REHEARSAL)
        if is_rehearsal(rows)
        else [
            *(*_wrapped(INTRO), ""),
            *_table(expectations(rows)),
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


def _when(rows: Sequence[Row]) -> str:
    times = sorted(row.at for row in latest(rows) if row.at)
    return f"{times[0]} to {times[-1]}" if times else "nothing was measured yet"


def _wrapped(text: str, mark: str = "") -> list[str]:
    indent = " " * len(mark)
    return textwrap.wrap(text, WIDTH, initial_indent=mark, subsequent_indent=indent)


def _table(table: Table) -> Iterator[str]:
    """Columns that do not fit go below, under the same names of lines."""
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
    return name if len(name) <= width else f"{name[: width - 3]}..."


def _fitting(widths: Sequence[int], first: int) -> Iterator[list[int]]:
    """Groups of columns that fit beside the first one."""
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
    """Names and long texts."""
    for name, value in table.lines:
        wrapped = textwrap.wrap(value, max(20, WIDTH - first - GAP)) or [""]
        for number, part in enumerate(wrapped):
            yield f"{name if number == 0 else '':<{first}}{' ' * GAP}{part}"[:WIDTH].rstrip()


def as_page(rows: Sequence[Row]) -> str:
    """One page, without scripts and without anything that must be fetched."""
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


def _html_expectations(rows: Sequence[Row]) -> Iterator[str]:
    if is_rehearsal(rows):
        yield f"<p>{_safe(REHEARSAL)}</p>"
        return
    yield f"<h2>Expected and measured</h2><p>{_safe(INTRO)}</p>"
    yield _html_table(expectations(rows))


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
    return html.escape(text)
