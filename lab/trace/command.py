"""`python -m coordinator trace-summary`: show what a text spent its time on, and draw it."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from lab.trace import report
from lab.trace.critical_path import Path as CriticalPath
from lab.trace.critical_path import overlap, paths_of
from lab.trace.reading import Trace, parse
from proto.errors import ConfigurationError, shown
from proto.system import cannot_read


def trace_summary(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace that --trace has written.")],
    *,
    text: Annotated[
        int | None,
        typer.Option(min=1, help="Summarise only this text; 1 is the first. Default: all."),
    ] = None,
    rounds: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-LAST",
            help="List these rounds of one text, and draw them. Default: no round is listed, and "
            "--plot draws some with a rejected draft.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object, no table.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the timeline of some rounds into this file as well."
        ),
    ] = None,
) -> None:
    """Show where the time of a trace went.

    It follows the critical path of each token.
    """
    if plot is not None:
        from lab.plan.figure import empty, save
        from lab.trace import figure

        picture = empty(plot)
    trace = _read(file)
    paths = _chosen(trace, text, file)
    shown = _rounds(rounds, paths)
    if plot is not None:
        figure.draw(picture, trace, paths[0], shown or figure.interesting(paths[0]))
        save(picture, plot)
        typer.echo(f"picture: {plot}", err=True)
    if as_json:
        typer.echo(json.dumps(report.as_record(trace, paths, overlap(trace))))
    else:
        report.show(trace, paths, overlap(trace), shown)


def _read(file: Path) -> Trace:
    """Read a trace file. Raises ConfigurationError."""
    try:
        return parse(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {cannot_read(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is no text, so no trace") from error


def _chosen(trace: Trace, text: int | None, file: Path) -> list[CriticalPath]:
    """Return the critical paths of the chosen texts, at least one. Raises ConfigurationError."""
    paths = [path for path in paths_of(trace) if text in (None, path.text)]
    if not paths:
        which = "no text" if text is None else f"no text {text}"
        raise ConfigurationError(
            f"{file} has {which} of which anything was written; it holds {len(trace.texts)} texts"
        )
    return paths


def _rounds(rounds: str | None, paths: list[CriticalPath]) -> range | None:
    """Return the wanted rounds as indices of the first path's rounds; None: none are wanted.

    Raises ConfigurationError for numbers that are no rounds.
    """
    if rounds is None:
        return None
    found = re.fullmatch(r"(\d+)-(\d+)", rounds)
    total = len(paths[0].rounds)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last <= total:
        raise ConfigurationError(
            f"--rounds: expected two numbers from 1 to {total} like 3-9, got {shown(rounds)}"
        )
    return range(first - 1, last)
