"""The options of the command line that are no settings; those are in `flags`."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.screens.panels import OUTPUT_PANEL

Prompt = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The text to continue; - reads stdin."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='Several prompts. One per line, or JSON Lines with "prompt" or "turns" (.jsonl). '
        "Up to --max-num-seqs are answered at once, and shown one after another, in their order.",
    ),
]
PromptIds = Annotated[
    str | None, typer.Option(metavar="ID,...", help="Token ids instead of a text: 1,2,3.")
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Answer each prompt, by the target's chat template.")
]

Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="One JSON object per prompt on stdout, nothing else.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
ShowSpeculation = Annotated[
    bool,
    typer.Option(
        "--show-speculation",
        help="Show what became of the drafts in the text. Accepted and rejected ones and the "
        "target's own tokens.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        help="All figures of the text, and what ran the models.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Record what every process does to this file. A Chrome trace, for ui.perfetto.dev "
        "and python -m coordinator trace-summary.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
