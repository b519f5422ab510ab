"""Draws `--help` of a command: options in panels, one line each, with examples at the end.

typer stores the panel of each option (`rich_help_panel`). The panels are drawn here, because typer
gives all options of a panel the width of the longest, and cuts off longer text: at 80 columns that
happens in eight lines of `generate`.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from coordinator.api.models.settings import ModelsConfig
from coordinator.cli.wrapping import continued
from proto.installation import MODELS

# -- panels ----------------------------------------------------------------------------------------

# How the help shows a setting: its panel, the placeholder for its value, its default.

# The panels from top to bottom. Options without a panel are in the first one, with --help.
MODEL_PANEL, SAMPLING_PANEL, SPECULATION_PANEL = "Models", "Sampling", "Speculation"
DEVICE_PANEL, OUTPUT_PANEL, SERVER_PANEL = "Devices", "Output", "Server"
HOST_PANEL, REHEARSAL_PANEL, RARE_PANEL = (
    "Other hosts",
    "Rehearsal of other hardware",
    "Rarely needed",
)
PANELS = (
    *("", SERVER_PANEL, MODEL_PANEL, SAMPLING_PANEL, SPECULATION_PANEL, DEVICE_PANEL, OUTPUT_PANEL),
    *(HOST_PANEL, REHEARSAL_PANEL, RARE_PANEL),
)
# The panel of a setting: by its name if listed in OF_NAME, else by its config.
OF_CONFIG = {
    "ServeConfig": SERVER_PANEL,
    "PairConfig": DEVICE_PANEL,
    "SpeculationConfig": SPECULATION_PANEL,
    "SamplingParams": SAMPLING_PANEL,
    "LaunchConfig": HOST_PANEL,
}
OF_NAME = {
    **dict.fromkeys(ModelsConfig.model_fields, MODEL_PANEL),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), OUTPUT_PANEL),
    **dict.fromkeys(("start_timeout_s", "busy_poll_us", "drafter_restarts"), RARE_PANEL),
    "max_draft_candidates": RARE_PANEL,
}
REHEARSAL_PREFIXES = ("simulate_", "link")

METAVARS = {
    **dict.fromkeys(("served_model_name", "allowed_host"), "NAME"),
    "host": "ADDRESS",
    "allow_origin": "ORIGIN",
    **dict.fromkeys(("target", "drafter", "heads"), "MODEL"),
    **dict.fromkeys(("target_revision", "drafter_revision", "heads_revision"), "REVISION"),
    **dict.fromkeys(("target_device", "drafter_device"), "DEVICE"),
    **dict.fromkeys(("stop", "bad_words"), "TEXT"),
    "seed": "SEED",
}
UNITS = {
    "s": "SECONDS",
    "ms": "MS",
    "row": "MS",
    "token": "MS",
    "us": "MICROSECONDS",
}  # by the last word of a name
LONGEST_CHOICES = 20  # characters


def panel_of(config: str, name: str) -> str:
    """Return the panel of a field, by the names of its config and of the field."""
    if name.startswith(REHEARSAL_PREFIXES):
        return REHEARSAL_PANEL
    return OF_NAME.get(name) or OF_CONFIG.get(config, "")


def _place_of(panel: str) -> int:
    """Return the position of a panel; unknown panels come last."""
    return PANELS.index(panel) if panel in PANELS else len(PANELS)


def metavar_of(name: str, annotation: Any) -> str | None:
    """Return the placeholder for a value of this type, such as N; None for a flag without value."""
    if name in METAVARS:
        return METAVARS[name]
    kind = kind_of(annotation)
    if kind is bool:
        return None
    if (unit := UNITS.get(name.rpartition("_")[2])) is not None:
        return unit
    if get_origin(kind) is Literal:
        choices = "|".join(choice for choice in get_args(kind) if choice)
        return choices if len(choices) <= LONGEST_CHOICES else "NAME"
    names: dict[Any, str] = {int: "N", float: "NUMBER", Path: "FILE"}
    return names.get(kind, "TEXT")


def kind_of(annotation: Any) -> Any:
    """Return the type without its annotations and without None."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(arguments[0])
    if origin in (Union, UnionType):
        return next(kind_of(one) for one in arguments if one is not NoneType)
    return annotation


def default_of(default: object) -> bool | str:
    """Return how a default is shown: False (not at all), its own words, or True (as typer does)."""
    if default in (None, "") or default is False:
        return False
    if isinstance(default, str | Path) and Path(default).is_relative_to(MODELS):
        return Path(default).relative_to(MODELS.parent).as_posix()
    return True


# -- help ------------------------------------------------------------------------------------------

MAX_WIDTH = 110  # longest readable line
FLAG_WIDTH = 28  # a longer flag has a line of its own
NARROW = 72  # on a narrower terminal every flag has
FRAME_WIDTH = 4  # of a panel, left and right
HELP_INDENT = 4  # of what stands below a flag there
GAP = "\ue000"  # a space at which no line ends, until the lines are made; in no help
BRACES = re.compile(r"\{([A-Z]+)\}")  # so typer marks an argument that is needed
FIRST_SENTENCE = re.compile(r".*?[.:;](?=\s|$)|.*", re.DOTALL)

Row = tuple[str, str, str]  # a flag with the placeholder of its value, its help, its default

EXAMPLES = {
    "generate": (
        '"class Codec(codecs.Codec):"',
        '--temperature 0.8 --seed 7 --show-speculation "import os"',
        '--target LARGE --drafter SMALL --chat "Why is the sky blue?"',
        "--prompt-file prompts.txt --json --policy ar",
    ),
    "demo": ("", '--pace 0 --temperature 0 "class Queue:"'),
    "chat": ("--target LARGE --drafter SMALL",),
    "serve": (
        "--target LARGE --drafter SMALL",
        "--host 0.0.0.0 --port 8080 --api-key-file key.txt",
    ),
    "verify-lossless": ("", "--target LARGE --drafter SMALL --policy auto"),
    "experiment": ("policies --report", "policies --limit 4 --set max_tokens=32"),
    "measure": ("", "--target LARGE --drafter SMALL --prompts prompts.txt"),
    "plan": (
        "--target-ms 30 --draft-ms 4 --acceptance 0.8",
        "--like llama-3.1-70b --plot plan.png",
    ),
    "testbed": ("--like 0.5b --out testbeds/half-a-billion",),
    "train-head": (
        "--target LARGE --texts prompts.txt --minutes 60 --out my-head",
        "--target LARGE --kind medusa --drafter SMALL --out my-medusa",
    ),
    "trace-summary": ("trace.json --rounds 5-9 --plot rounds.png",),
}


def examples(command: str, program: str) -> str | None:
    """Return the example lines below the help of a command; None if it has none."""
    lines = [
        f"  {program} {command} {arguments}".rstrip() for arguments in EXAMPLES.get(command, ())
    ]
    return "\n".join(lines) if lines else None


class Command(TyperCommand):
    """A command of typer that draws its help with the panels of this file."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Print the help; `formatter` stays empty, so typer prints nothing more."""
        console = _show(self, ctx, _panels(self.get_params(ctx), ctx))
        if self.epilog:
            _show_examples(self.epilog, console)


class Program(TyperGroup):
    """A group of commands that draws its help with the panels of this file."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Print the help, with a list of the commands; `formatter` stays empty."""
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, " ".join((one.help or "").partition("\n\n")[0].split()), "")
            for name, one in found.items()
            if one is not None and not one.hidden
        ]
        console = _show(self, ctx, _panels(self.get_params(ctx), ctx), rows)
        if self.epilog:
            console.print(Padding(Text(self.epilog, style="dim"), (0, 1)))


def _show(
    command: Any, ctx: Any, panels: list[tuple[str, list[Row]]], commands: Sequence[Row] = ()
) -> Console:
    """Print the usage, what the command does, and its panels; return the console."""
    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    usage = BRACES.sub(r"\1", command.get_usage(ctx))
    console.print(Padding(Text(usage, style="bold"), (1, 1)))
    first, _, more = (command.help or "").partition("\n\n")
    console.print(Padding(Text(" ".join(first.split())), (0, 1, 1, 1)))
    if more:
        console.print(Padding(Text(" ".join(more.split()), style="dim"), (0, 1, 1, 1)))
    flag_width = FLAG_WIDTH if console.width >= NARROW else 0
    tables: list[tuple[str, Sequence[Row], int]] = [
        (title, rows, flag_width) for title, rows in panels
    ]
    if commands:
        tables.append(("Commands", commands, 1 + max(len(name) for name, *_ in commands)))
    for title, rows, width in tables:
        lines = _lines(rows, width, console)
        console.print(Panel(lines, title=title, title_align="left", border_style="dim"))
    return console


def _show_examples(examples: str, console: Console) -> None:
    # Without padding behind a line: a \ at its end must be the last sign when it is pasted.
    made = [line for one in examples.split("\n") for line in continued(one, console.width)]
    console.print(Text("\n".join(("\n Examples:", *made, ""))), soft_wrap=True)


def _panels(parameters: list[Any], ctx: Any) -> list[tuple[str, list[Row]]]:
    """Return (title, rows) of every panel, from top to bottom."""
    panels: defaultdict[str, list[Row]] = defaultdict(list)
    for one in parameters:
        if not getattr(one, "hidden", False):
            panels[getattr(one, "rich_help_panel", None) or ""].append(_row(one, ctx))
    return [(title or "Options", panels[title]) for title in sorted(panels, key=_place_of)]


def rows_of(command: Any, ctx: Any) -> list[Row]:
    """Return a row for each flag of a command: placeholder of its value, help and default."""
    panels = _panels(command.get_params(ctx), ctx)
    return [row for _, rows in panels for row in rows]


def _row(parameter: Any, ctx: Any) -> Row:
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else []
    value = "" if getattr(parameter, "is_flag", False) else parameter.metavar
    if value is None:
        value = _placeholder((parameter.display_type_rich(ctx=ctx) or "").strip("<>"))
    return (
        " ".join((*[", ".join(names)][: len(names)], value)),
        parameter.help or "",
        _default(parameter),
    )


def _placeholder(kind: str) -> str:
    """Return the placeholder for a value by typer's name of its type; choices stay as they are."""
    if "|" in kind:
        return kind
    numbers = {"int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER"}
    return numbers.get(kind.lower(), kind.upper())


def _default(parameter: Any) -> str:
    """Return a default as the help shows it; "" if it is not shown."""
    shown, default = getattr(parameter, "show_default", False), parameter.default
    if "Default:" in (parameter.help or ""):  # there it is in words
        return ""
    if shown is True and not callable(default):
        shown = default_of(default)
    if isinstance(shown, str):
        return shown
    if shown is not True or callable(default):
        return ""
    return "on" if default is True else str(default)


def _lines(rows: Sequence[Row], width: int, console: Console) -> RenderableType:
    """Return a line for each flag, with its help beside it, or below it if the flag is long.

    width  of the column of flags; 0: the help is always below
    """
    beside = width + 1 if width else HELP_INDENT
    drawn: list[Text] = []
    for flag, text, default in rows:
        first = FIRST_SENTENCE.match(text)
        end = first.end() if first else len(text)
        told = Text.assemble(text[:end], (text[end:], "dim"))
        if default:
            before = "\n" if "\n" in text else " "
            told.append(f"{before}[default:{GAP}{default}]", style="dim")
        name, _, value = flag.partition(" ")
        shown = Text.assemble((name, "bold cyan"), " ", (value, "yellow"))
        lines = _wrapped(told, console.width - FRAME_WIDTH - beside, console)
        if len(flag) <= width:
            shown.pad_right(beside - len(shown))
        else:
            drawn.append(shown)
            shown = Text(" " * beside)
        for line in lines:
            drawn.append(Text.assemble(shown, line))
            shown = Text(" " * beside)
    return Group(*drawn)


def _wrapped(told: Text, room: int, console: Console) -> list[Text]:
    """Return the lines of a help text; a list in it has a line for each item, indented."""
    found: list[Text] = []
    for number, one in enumerate(told.split("\n")):
        indent = "  " if number else ""
        lines = one.wrap(console, room - len(indent), overflow="fold")
        found += [Text(indent if place else "") + line for place, line in enumerate(lines)]
    for line in found:
        line.plain = line.plain.replace(GAP, " ")
    return found
