"""`python -m coordinator plan`: what each policy would come to on given hardware.

The machines that are rehearsed are loaded when the command runs: no other command needs them.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field
from rich.console import Console

from coordinator.api.config_base import Frozen
from coordinator.cli.flags import with_settings
from proto.messages import MAX_SESSIONS

MIN_TOKENS = 64

Milliseconds = Annotated[float, Field(ge=0, le=1e6)]
Duration = Annotated[float, Field(ge=1e-3, le=1e6)]  # milliseconds
Amount = Annotated[float, Field(ge=1, le=1e18)]


class Costs(Frozen):
    """What things take: the forwards as they are, or by the roofline."""

    target_ms: Annotated[
        Duration | None, Field(description="A target pass of one row takes so long.")
    ] = None
    draft_ms: Annotated[
        Duration | None, Field(description="A draft step of one row takes so long.")
    ] = None
    verify_ms_per_token: Annotated[
        Milliseconds, Field(description="Each further row of a target pass.")
    ] = 0.0
    draft_ms_per_row: Annotated[
        Milliseconds, Field(description="Each further row of a draft step.")
    ] = 0.0
    hop_ms: Annotated[
        Milliseconds, Field(description="A message from drafter to target, one way.")
    ] = 0.1
    host_us: Annotated[
        Milliseconds, Field(description="On the target's host for each pass, besides the model.")
    ] = 100.0
    draft_host_us: Annotated[
        Milliseconds, Field(description="On the drafter's host for each step, likewise.")
    ] = 50.0
    target_params: Annotated[
        Amount | None, Field(description="Roofline, instead of --target-ms: parameters (8e9).")
    ] = None
    target_bytes: Annotated[
        Amount | None, Field(description="Bytes of its weights. Default: 2 for each parameter.")
    ] = None
    target_bandwidth: Annotated[
        Amount | None, Field(description="Of its memory, bytes a second (3.35e12).")
    ] = None
    target_flops: Annotated[
        Amount | None, Field(description="Its peak, FLOPs a second (9.9e14). Default: no limit.")
    ] = None
    draft_params: Annotated[
        Amount | None, Field(description="Roofline, instead of --draft-ms: as for the target.")
    ] = None
    draft_bytes: Annotated[Amount | None, Field(description="As for the target.")] = None
    draft_bandwidth: Annotated[Amount | None, Field(description="As for the target.")] = None
    draft_flops: Annotated[Amount | None, Field(description="As for the target.")] = None


class Texts(Frozen):
    """What is written: how often drafts are right, how many texts, how long."""

    acceptance: Annotated[
        str,
        Field(
            description="How often the target says the drafter's first choice, its second, and so "
            "on: 0.75,0.12,0.05. After a single number the second has 0.4 of what is left, each "
            "further one 0.25 of that."
        ),
    ] = "0.75"
    trace: Annotated[
        str,
        Field(
            description="A file, instead: what a real pair did, as recorded by "
            "python -m lab.measure.ranks."
        ),
    ] = ""
    num_texts: Annotated[
        int, Field(ge=1, le=MAX_SESSIONS, description="Texts that are written at once.")
    ] = 1
    num_tokens: Annotated[
        int, Field(ge=MIN_TOKENS, le=1 << 16, description="Tokens of each that are rehearsed.")
    ] = 320


@with_settings
def plan(
    *,
    costs: Costs,
    texts: Texts,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no table.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw speed-up over acceptance and over hop to this file as well."),
    ] = None,
) -> None:
    """Predict what each policy makes of given costs: its real machines in virtual time."""
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
    if as_json:
        typer.echo(json.dumps(report.as_record(case, made)))
    else:
        report.show(case, made)
