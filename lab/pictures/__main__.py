"""`python -m lab.pictures`: make the pictures of the README anew."""

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from coordinator.api.refusals import one_of
from lab.pictures import rounds, screen
from lab.plan.figure import empty, save
from lab.trace.reading import Trace, parse
from proto.errors import ConfigurationError, SlipstreamError
from proto.installation import ROOT

COORDINATOR = (sys.executable, "-m", "coordinator")
PROMPT = 'def read_lines(path, encoding="utf-8"):'
# Experiments and the picture of each that is kept.
EXPERIMENTS = ("cost_ratio", "draft_length", "hop")
NAMES = ("demo", "rounds", "recordings", *EXPERIMENTS)
WIDTHS = (80, 120)
# What a newcomer sees, kept as text with the colours' codes: `cat` shows it as it was.
RECORDED = {
    "demo": ("demo", "--pace", "0"),
    "generate": ("generate", "--temperature", "0.8", "--seed", "7", "--verbose", PROMPT),
    "help": ("generate", "--help"),
    "mistake": ("generate", "--policy", "sink", PROMPT),
}
TRACED = ("--max-tokens", "64", "--ignore-eos", "--dtype", "float32")
LIMIT_S = 1200.0


def demo(out: Path) -> None:
    """What `make demo` shows at a terminal of 80 columns."""
    said = screen.record([*COORDINATOR, "demo", "--pace", "0"], ROOT, LIMIT_S)
    shown = screen.after(said, "The target alone")
    (out / "demo.svg").write_text(screen.as_svg(shown, "make demo"), encoding="utf-8")


def timeline(out: Path) -> None:
    """The same time of `sync` and of `tree`, from a trace of each."""
    traces = {policy: _traced(policy) for policy in ("sync", "tree")}
    figure = empty(out / "rounds.png")
    rounds.draw(figure, traces)
    save(figure, out / "rounds.png")


def _traced(policy: str) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        words = ["generate", "--policy", policy, *TRACED, "--trace", str(file), PROMPT]
        screen.record([*COORDINATOR, *words], ROOT, LIMIT_S)
        return parse(file.read_text(encoding="utf-8"), policy)


def recordings(out: Path) -> None:
    """What these commands show at terminals of both widths."""
    for name, words in RECORDED.items():
        for columns in WIDTHS:
            may_fail = name == "mistake"
            said = screen.record([*COORDINATOR, *words], ROOT, LIMIT_S, columns, may_fail=may_fail)
            file = out / f"{name}-{columns}.txt"
            file.write_text(f"$ slipstream {shlex.join(words)}\n{said}", encoding="utf-8")


def experiment(name: str, out: Path) -> None:
    """The figure of an experiment over what it varies."""
    with tempfile.TemporaryDirectory() as folder:
        screen.record([*COORDINATOR, "experiment", name, "--out", folder], ROOT, LIMIT_S)
        figure = Path(folder) / "along_x.png"
        if not figure.exists():
            raise ConfigurationError(f"the experiment {name} drew nothing over what it varies")
        (out / f"{name}.png").write_bytes(figure.read_bytes())


def pictures(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Some of {', '.join(NAMES)}. Default: all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = ROOT / "docs" / "pictures",
) -> None:
    """Make the pictures anew. All together take a quarter of an hour on two cores."""
    for name in names or NAMES:
        if name not in NAMES:
            raise ConfigurationError(one_of("NAMES", NAMES, name))
        typer.echo(f"{name} ...", err=True)
        if name == "demo":
            demo(out)
        elif name == "rounds":
            timeline(out)
        elif name == "recordings":
            recordings(out)
        else:
            experiment(name, out)


def main() -> int:
    """Run it; an error is one line. Returns the exit status."""
    try:
        typer.run(pictures)
    except (SlipstreamError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
