"""`python -m coordinator measure`: say of a pair how often drafts are right, and what to expect.

What knows the simulator is imported only when the command runs, because no other command needs it.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.api.config import PairConfig
from coordinator.cli.flags import SIMULATION, Flags, with_settings
from coordinator.cli.loading_screen import models_of
from coordinator.cli.writers import WIDTH, Progress
from proto.installation import ROOT

SHIPPED = ROOT / "lab" / "experiments" / "prompts.jsonl"

LEAST_TOKENS, USUAL_TOKENS, USUAL_PROMPTS = 48, 64, 6

Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file",
        metavar="FILE",
        help="The prompts that the target continues. One per line, or JSON Lines as for "
        "`generate`. Default: prompts of Python code that come with Slipstream.",
    ),
]
NumPrompts = Annotated[
    int, typer.Option(min=2, max=1000, help="How many prompts, spread over the file.")
]
MaxTokens = Annotated[
    int, typer.Option(min=LEAST_TOKENS, max=4096, help="How many tokens each text has at most.")
]
Out = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="Write what was measured into this file, for `plan --pair`. A page to read, with the "
        "ending .md, is written beside it.",
    ),
]


@with_settings
def measure(
    *,
    pair: Annotated[
        PairConfig,
        Flags(
            *("target", "target_revision", "drafter", "drafter_revision"),
            *("target_device", "drafter_device", "tensor_parallel_size"),
            *("dtype", "drafter_dtype", "backend", "busy_poll_us", "start_timeout_s"),
            *SIMULATION,
            max_num_seqs=1,
            target_restarts=0,
            drafter_restarts=0,
            keep_speeds=False,
        ),
    ],
    prompts: Prompts = None,
    num_prompts: NumPrompts = USUAL_PROMPTS,
    max_tokens: MaxTokens = USUAL_TOKENS,
    out: Out = Path("pair.json"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the content of the file to stdout, no tables.")
    ] = False,
) -> None:
    """Measure what to expect of a pair.

    It counts how often drafts are right, and times what everything costs.

    Target and drafter run where `generate` would run them. It takes about two minutes if a target
    pass takes less than 60 ms; else it says at the beginning how long it will take.
    """
    from lab.pair import stages, words

    console = Console(stderr=True, highlight=False)
    stages.check(pair, out)
    turns = stages.turns_of(prompts or SHIPPED, num_prompts)
    with Progress(Console(stderr=True), models_of(pair)) as progress:
        started = stages.start(pair, turns, max_tokens, progress.say)
    with started as running:
        written = stages.write_texts(running, turns, max_tokens, console)
    with console.status("reading the texts with both models") as status:
        measured = stages.with_chances(written, status.update)
    with console.status("rehearsing") as status:
        measured = stages.with_plan(measured, written.run, pair, status.update)
    if as_json:
        typer.echo(stages.as_json(measured))
    else:
        Console(width=WIDTH).print(words.on_screen(measured))
    page = stages.save(measured, out)
    typer.echo(f"{out} is for `plan --pair`; {page} is the same to read", err=as_json)
