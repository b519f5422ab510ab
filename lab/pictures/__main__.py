"""`python -m lab.pictures`: make the pictures of the README and its pages anew.

What a picture shows is kept as data beside it: `--redraw` draws it from that, and runs nothing.
"""

import dataclasses
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from coordinator.api.refusals import one_of
from coordinator.cli.help import Command
from lab.experiments.folder import ROWS, read_header
from lab.experiments.results import curves
from lab.experiments.results.lateness import with_void_arms
from lab.experiments.results.summary import overall, summarize
from lab.experiments.rows import read
from lab.pictures import rounds, screen
from lab.plan.figure import empty, save
from lab.records import from_json
from lab.trace.reading import Trace, parse
from proto.errors import ConfigurationError, SlipstreamError
from proto.installation import ROOT

COORDINATOR = (sys.executable, "-m", "coordinator")
COMMAND = Path(sys.executable).with_name("slipstream")  # of the same environment
SHOWN = ".venv/bin/slipstream"
PROMPT = 'def read_lines(path, encoding="utf-8"):'
# Experiments whose picture along the x axis is kept.
EXPERIMENTS = ("cost_ratio", "draft_length", "hop")
NAMES = ("demo", "rounds", "recordings", *EXPERIMENTS)
WIDTHS = (80, 120)
# Commands whose output is kept as text with colour codes, so that `cat` shows it in colour.
RECORDED = {
    "demo": ("demo", "--fetch", "--pace", "0"),
    "generate": (
        "generate",
        "--target",
        "toy",
        "--temperature",
        "0.8",
        "--seed",
        "7",
        "--verbose",
        PROMPT,
    ),
    "help": ("generate", "--help"),
    "mistake": ("generate", "--policy", "sink", PROMPT),
}
ROUNDS_TITLE = "What each process does, under two policies, in the same span of time"
ROUNDS_FACTS = (
    "A part of one text, measured on two CPU cores, one for each model: the toy pair in float32.",
    "Nothing is simulated. Not measured: GPUs.",
)
TRACED = ("--target", "toy", "--max-tokens", "64", "--ignore-eos", "--dtype", "float32")
LIMIT_S = 1200.0


def demo(out: Path) -> None:
    """Run `make demo` on a terminal of 80 columns, and draw what it shows there."""
    said = screen.record([*COORDINATOR, "demo", "--fetch"], ROOT, LIMIT_S)
    shown = screen.after(said, "The target alone")
    (out / "demo.svg").write_text(screen.as_svg(shown, "make demo"), encoding="utf-8")


def timeline(out: Path) -> None:
    """Draw a span of time of equal length under `sync` and under `tree`, from a trace of each."""
    traces = {policy: _traced(policy) for policy in ("sync", "tree")}
    _write(out / "rounds.json", rounds.rounds_of(traces, ROUNDS_TITLE, ROUNDS_FACTS))
    redraw_timeline(out)


def redraw_timeline(out: Path) -> None:
    """Draw the picture of rounds from the data in `rounds.json`.

    Raises ConfigurationError if the picture cannot be drawn or saved.
    """
    figure = empty(out / "rounds.png")
    rounds.draw(figure, from_json(rounds.Rounds, _read(out / "rounds.json")))
    save(figure, out / "rounds.png")


def _traced(policy: str) -> Trace:
    """Generate a text under this policy and return its trace."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        words = ["generate", "--policy", policy, *TRACED, "--trace", str(file), PROMPT]
        screen.record([*COORDINATOR, *words], ROOT, LIMIT_S)
        return parse(file.read_text(encoding="utf-8"), policy)


def recordings(out: Path) -> None:
    """Store the output of the RECORDED commands on terminals of both widths."""
    for name, words in RECORDED.items():
        for columns in WIDTHS:
            may_fail = name == "mistake"
            said = screen.record([str(COMMAND), *words], ROOT, LIMIT_S, columns, may_fail=may_fail)
            file = out / f"{name}-{columns}.txt"
            file.write_text(f"$ {SHOWN} {shlex.join(words)}\n{said}", encoding="utf-8")


def experiment(name: str, out: Path) -> None:
    """Run an experiment, and draw its speed-up over what it varies. Raises ConfigurationError."""
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        screen.record([*COORDINATOR, "experiment", name, "--out", name_of_folder], ROOT, LIMIT_S)
        header = read_header(folder)
        baselines = {arm.name: arm.baseline for arm in header.arms}
        rows = with_void_arms(read(folder / ROWS), baselines)
    speedups = {
        one.arm: one.speedup for one in overall(summarize(header, rows)) if one.speedup is not None
    }
    found = curves.curves_of(header, speedups)
    if found is None:
        raise ConfigurationError(f"the experiment {name} drew nothing over what it varies")
    _write(out / f"{name}.json", found)
    redraw_experiment(name, out)


def redraw_experiment(name: str, out: Path) -> None:
    """Draw it of the data that are kept."""
    found = from_json(curves.Curves, _read(out / f"{name}.json"))
    (out / f"{name}.png").write_bytes(curves.draw(found))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _write(path: Path, data: curves.Curves | rounds.Rounds) -> None:
    path.write_text(json.dumps(dataclasses.asdict(data), indent=1) + "\n", encoding="utf-8")


def pictures(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help=f"Some of {', '.join(NAMES)}. Default: all."),
    ] = None,
    *,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder to write to. Default: docs/pictures.")
    ] = ROOT / "docs" / "pictures",
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Run nothing: draw from the data of the last run.")
    ] = False,
) -> None:
    """Make the pictures of the documentation again.

    All of them together take a quarter of an hour on two cores.
    """
    every = (*EXPERIMENTS, "rounds") if redraw else NAMES
    for name in names or every:
        if name not in every:
            raise ConfigurationError(one_of("NAMES", every, name))
        typer.echo(f"{name} ...", err=True)
        if name == "demo":
            demo(out)
        elif name == "rounds":
            (redraw_timeline if redraw else timeline)(out)
        elif name == "recordings":
            recordings(out)
        else:
            (redraw_experiment if redraw else experiment)(name, out)


def main() -> int:
    """Make the pictures; return the exit status. An error is printed as one line."""
    try:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(cls=Command)(pictures)
        app(prog_name="python -m lab.pictures")
    except (SlipstreamError, OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
