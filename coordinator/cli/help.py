"""`--help` of a command: its options in panels, a line for its flag and value, examples at the end.

Which panel an option is in, typer knows (`rich_help_panel`). The panels are drawn here, because
typer's give all options of a panel the room of the longest, and cut off what is longer: at 80
columns that happens in eight lines of `generate`.
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
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from coordinator.api.models.settings import ModelsConfig
from proto.installation import MODELS

# -- panels ----------------------------------------------------------------------------------------

# How the help shows a setting: in which panel, what stands for its value, its default.

# Panels, from top to bottom; what is in none of them is in the first, with --help.
MODEL_PANEL, SAMPLING_PANEL, SPECULATION_PANEL = "Models", "Sampling", "Speculation"
DEVICE_PANEL, OUTPUT_PANEL = "Devices", "Output"
HOST_PANEL, REHEARSAL_PANEL, RARE_PANEL = (
    "Other hosts",
    "Rehearsal of other hardware",
    "Rarely needed",
)
PANELS = (
    *("", MODEL_PANEL, SAMPLING_PANEL, SPECULATION_PANEL, DEVICE_PANEL, OUTPUT_PANEL),
    *(HOST_PANEL, REHEARSAL_PANEL, RARE_PANEL),
)
# By the config that a setting is of, and its name where that says more.
OF_CONFIG = {
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
    **dict.fromkeys(("target", "drafter", "heads"), "MODEL"),
    **dict.fromkeys(("target_revision", "drafter_revision", "heads_revision"), "REVISION"),
    **dict.fromkeys(("target_device", "drafter_device"), "DEVICE"),
    **dict.fromkeys(("stop", "bad_words"), "TEXT"),
    "seed": "SEED",
}
UNITS = {"s": "SECONDS", "ms": "MS", "row": "MS", "us": "US"}  # by the last word of a name
LONGEST_CHOICES = 20  # characters


def panel_of(config: str, name: str) -> str:
    """The panel of a field of a config, by their names."""
    if name.startswith(REHEARSAL_PREFIXES):
        return REHEARSAL_PANEL
    return OF_NAME.get(name) or OF_CONFIG.get(config, "")


def _place_of(panel: str) -> int:
    """Where a panel stands; one that is not known, at the end."""
    return PANELS.index(panel) if panel in PANELS else len(PANELS)


def metavar_of(name: str, annotation: Any) -> str | None:
    """What stands for a value of this type; None: a flag has none."""
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
    """The type without what is said about it, and without None."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(arguments[0])
    if origin in (Union, UnionType):
        return next(kind_of(one) for one in arguments if one is not NoneType)
    return annotation


def default_of(default: object) -> bool | str:
    """How a default is shown: not at all, in its own words, or as typer shows it."""
    if default in (None, "") or default is False:
        return False
    if isinstance(default, str | Path) and Path(default).is_relative_to(MODELS):
        return Path(default).relative_to(MODELS.parent).as_posix()
    return True


# -- help ------------------------------------------------------------------------------------------

MAX_WIDTH = 110  # of lines that one can still read
FLAG_WIDTH = 28  # a longer flag has a line of its own
FIRST_SENTENCE = re.compile(r".*?[.:;](?=\s|$)|.*", re.DOTALL)

Row = tuple[str, str, str]  # a flag with what stands for its value, its help, its default

EXAMPLES = {
    "generate": (
        '"class Codec(codecs.Codec):"',
        '--temperature 0.8 --seed 7 --show-speculation \\\n    "import os"',
        '--target LARGE --drafter SMALL --chat \\\n    "Why is the sky blue?"',
        "--prompt-file prompts.txt --json --policy ar",
    ),
    "demo": ("", '--pace 0 --temperature 0 "class Queue:"'),
    "verify-lossless": ("", "--target LARGE --drafter SMALL \\\n    --policy auto"),
}


def examples(command: str, program: str) -> str | None:
    """The lines below the help of a command; None: there are none."""
    lines = [
        f"  {program} {command} {arguments}".rstrip() for arguments in EXAMPLES.get(command, ())
    ]
    return "\n".join((" Examples:", *lines)) if lines else None


class Command(TyperCommand):
    """A command that shows its help like this."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Print it; typer prints what `formatter` holds afterwards, and that is nothing."""
        _show(self, ctx, _panels(self.get_params(ctx), ctx))


class Program(TyperGroup):
    """Several commands, and their help likewise."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """As of `Command`."""
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, " ".join((one.help or "").partition("\n\n")[0].split()), "")
            for name, one in found.items()
            if one is not None
        ]
        _show(self, ctx, _panels(self.get_params(ctx), ctx), rows)


def _show(
    command: Any, ctx: Any, panels: list[tuple[str, list[Row]]], commands: Sequence[Row] = ()
) -> None:
    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    console.print(Padding(Text(command.get_usage(ctx), style="bold"), (1, 1)))
    first, _, more = (command.help or "").partition("\n\n")
    console.print(Padding(Text(" ".join(first.split())), (0, 1, 1, 1)))
    if more:
        console.print(Padding(Text(more, style="dim"), (0, 1, 1, 1)))
    tables = [(title, _table(rows, FLAG_WIDTH)) for title, rows in panels]
    if commands:
        width = 1 + max(len(name) for name, *_ in commands)
        tables.append(("Commands", _table(commands, width)))
    for title, table in tables:
        console.print(Panel(table, title=title, title_align="left", border_style="dim"))
    if command.epilog:
        # Without padding behind a line: a \ at its end must be the last sign when it is pasted.
        console.print(Text(f"\n{command.epilog}"), soft_wrap=True)


def _panels(parameters: list[Any], ctx: Any) -> list[tuple[str, list[Row]]]:
    """The rows of every panel, from top to bottom."""
    panels: defaultdict[str, list[Row]] = defaultdict(list)
    for one in parameters:
        if not getattr(one, "hidden", False):
            panels[getattr(one, "rich_help_panel", None) or ""].append(_row(one, ctx))
    return [(title or "Options", panels[title]) for title in sorted(panels, key=_place_of)]


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
    """What stands for a value of a kind, as typer calls it; choices stand for themselves."""
    if "|" in kind:
        return kind
    numbers = {"int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER"}
    return numbers.get(kind.lower(), kind.upper())


def _default(parameter: Any) -> str:
    """As it is shown; empty: it is not."""
    shown, default = getattr(parameter, "show_default", False), parameter.default
    if shown is True and not callable(default):
        shown = default_of(default)
    if isinstance(shown, str):
        return shown
    if shown is not True or callable(default):
        return ""
    return "on" if default is True else str(default)


def _table(rows: Sequence[Row], width: int) -> RenderableType:
    drawn: list[RenderableType] = []
    for flag, text, default in rows:
        first = FIRST_SENTENCE.match(text)
        end = first.end() if first else len(text)
        told = Text.assemble(text[:end], (text[end:], "dim"))
        if default:
            told.append(f" [default: {default}]", style="dim")
        name, _, value = flag.partition(" ")
        shown = Text.assemble((name, "bold cyan"), " ", (value, "yellow"))
        if len(flag) > width:
            drawn.append(shown)
            shown = Text("")
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_column(width=width, no_wrap=True)
        line.add_column(overflow="fold")
        line.add_row(shown, told)
        drawn.append(line)
    return Group(*drawn)
