"""`python -m coordinator plan`: predict the speed of each policy on given hardware.

The simulator is imported only when the command runs, because no other command needs it.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.cli.flags import with_settings
from lab.plan.settings import Costs, Texts


@with_settings
def plan(
    *,
    costs: Costs,
    texts: Texts,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object, no table.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw a picture into this file as well. It shows the speed-up over the "
            "acceptance and over the time of a hop.",
        ),
    ] = None,
) -> None:
    """Predict how fast each policy would be on given hardware.

    The state machines of drafter and target run in virtual time; no model is loaded.
    """
    from lab.plan import figure, report

    case = report.case_of(costs, texts)
    drawn = None if plot is None else figure.empty(plot)
    with Console(stderr=True).status("rehearsing") as status:

        def say(words: str) -> None:
            status.update(f"rehearsing {words}")

        made = report.make_plan(case, say=say)
        if plot is not None:
            figure.draw(drawn, case, say)
            figure.save(drawn, plot)
    if plot is not None:
        typer.echo(f"picture: {plot}", err=True)
    if as_json:
        typer.echo(json.dumps(report.as_record(case, made)))
    else:
        report.show(costs, case, made)
