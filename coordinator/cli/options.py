"""The options of the command line that are no settings; those are in `flags`."""

from pathlib import Path
from typing import Annotated

import typer

Prompt = Annotated[str | None, typer.Argument(help="The text to continue; - reads stdin.")]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        help='Several prompts: one per line, or JSON Lines with "prompt" or "turns" (.jsonl). '
        "Up to --max-num-seqs are answered at once, and shown one after another, in their order."
    ),
]
PromptIds = Annotated[str | None, typer.Option(help="Token ids instead of a text: 1,2,3.")]
Chat = Annotated[
    bool, typer.Option("--chat", help="Answer each prompt, by the target's chat template.")
]

Json = Annotated[
    bool, typer.Option("--json", help="One JSON object per prompt on stdout, nothing else.")
]
ShowSpeculation = Annotated[
    bool,
    typer.Option(
        "--show-speculation",
        help="Show accepted and rejected drafts and the target's own tokens in the text.",
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="Record what every process does to this file: a Chrome trace, for ui.perfetto.dev "
        "and python -m coordinator trace-summary."
    ),
]
