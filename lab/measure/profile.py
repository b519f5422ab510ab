"""`python -m coordinator profile`: show as a table where the time of each process goes."""

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from coordinator.api.config import (
    PairConfig,
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.cli.flags import SIMULATION, Flags, with_settings
from coordinator.cli.loading_screen import models_of
from coordinator.cli.writers import WIDTH, Progress, simulation
from lab.experiments.surroundings import machine
from lab.measure import shares
from lab.measure.shares import Profile
from rehearsal.lossless.command import PromptFile, TextPrompt, prompts_of, texts_of

WORDS = {
    "model": "model",
    "choose": "noise and choice",
    "prepare": "masks, tensors",
    "move": "cache rows",
    "decide": "tree, decisions",
    "decode": "reading messages",
    "send": "sending messages",
    "wait": "waiting",
}


@with_settings
def profile(
    *,
    pair: Annotated[
        PairConfig,
        Flags(
            *("target", "drafter", "drafter_home", "heads", "target_device", "drafter_device"),
            *("dtype", "backend", "busy_poll_us"),
            *SIMULATION,
            max_num_seqs=1,
            target_restarts=0,
            drafter_restarts=0,
            keep_speeds=False,
        ),
    ],
    speculation: Annotated[
        SpeculationConfig,
        Flags("policy", "num_speculative_tokens", "window", "adaptive", "also_ngram"),
    ],
    request: Annotated[SamplingParams, Flags("temperature", "max_tokens", max_tokens=256)],
    prompt: TextPrompt = None,
    prompt_file: PromptFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object, no table.")
    ] = False,
) -> None:
    """Show where the time of each process goes."""
    speculation.check(pair)
    texts = texts_of(prompt, prompt_file)
    request = request.model_copy(update={"seed": 1, "ignore_eos": True})
    with Progress(Console(stderr=True), models_of(pair)) as progress:
        started = Pair(pair, with_drafter=speculation.drafts, say=progress.say)
    with started as running:
        found = shares.profile(running, prompts_of(running, texts), speculation, request)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
        return
    typer.echo(f"machine: {machine()}\n")
    Console(width=WIDTH).print(_table(found))
    if any(share.beside_ms for share in found.shares):
        typer.echo(
            "beside model: what the host did while a device ran the model; it is part of the\n"
            "model's time, and is not added"
        )
    typer.echo(
        f"{speculation.policy}: {found.num_tokens} tokens in {found.num_passes} passes, "
        f"{found.tokens_per_second:.0f} tokens/s,\n{found.tokens_per_pass:.2f} tokens a pass; "
        f"outside of the models: {found.no_model_ms:.3f} ms a pass (median),\n"
        f"{found.host_ms:.3f} ms of it on the target's host"
    )
    if found.simulated is not None:
        typer.echo(simulation(found.simulated))
    if found.num_without_drafter:
        num_lost = found.num_without_drafter
        typer.echo(f"the drafter was lost: {num_lost} texts were without it, at least in part")
    for share in found.shares:
        if share.num_uncaptured:
            typer.echo(
                f"{share.process}: {share.num_uncaptured} of {share.number} had more rows than any "
                "CUDA graph, and ran kernel by kernel"
            )


def _table(found: Profile) -> Table:
    """Return the table of milliseconds and shares of each process by phase."""
    has_beside = any(share.beside_ms for share in found.shares)  # then there are more columns
    table = Table(box=None, pad_edge=False, collapse_padding=has_beside)
    table.add_column("")
    for share in found.shares:
        table.add_column(f"{share.process}\nms/{share.unit}", justify="right")
        table.add_column("\n%", justify="right")
        if share.beside_ms:
            table.add_column("beside\nmodel", justify="right")
    totals = [sum(share.ms.values()) for share in found.shares]
    for phase, words in WORDS.items():
        cells = []
        for share, total in zip(found.shares, totals, strict=True):
            cells += [f"{share.ms[phase]:.3f}", f"{share.ms[phase] / total:.0%}"]
            if share.beside_ms:
                cells.append(f"{share.beside_ms[phase]:.3f}" if phase in share.beside_ms else "")
        table.add_row(words, *cells)
    ends = []
    for share, total in zip(found.shares, totals, strict=True):
        ends += [f"{total:.3f}", "100%"]
        if share.beside_ms:
            ends.append(f"{sum(share.beside_ms.values()):.3f}")
    table.add_row("together", *ends)
    return table
