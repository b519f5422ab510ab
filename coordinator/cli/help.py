"""Draws the help of a command: `--help` on one screen, `--help-all` with every flag.

`--help` begins with examples and has the flags that most people need (`FIRST`). `--help-all` has
all options in panels, one line each, with the examples at the end.

typer stores the panel of each option (`rich_help_panel`). The panels are drawn here, because typer
gives all options of a panel the width of the longest, and cuts off longer text: at 80 columns that
happens in eight lines of `generate`.
"""

import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from coordinator.api.models.named import DEFAULT
from coordinator.api.models.settings import ModelsConfig
from coordinator.cli.arguments import HELP_ALL, Flag, Known, in_our_words
from coordinator.cli.foreign import every_name
from coordinator.cli.wrapping import continued
from proto.installation import MODELS, program

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
    "ReplicasConfig": HOST_PANEL,
}
OF_NAME = {
    **dict.fromkeys(ModelsConfig.model_fields, MODEL_PANEL),
    **dict.fromkeys(("targets", "drafters"), DEVICE_PANEL),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), OUTPUT_PANEL),
    **dict.fromkeys(
        ("start_timeout_s", "busy_poll_us", "target_restarts", "drafter_restarts", "keep_speeds"),
        RARE_PANEL,
    ),
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
    if default in (None, "", DEFAULT) or default is False:
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
WHOLE_SENTENCE = re.compile(r".*?\.(?=\s|$)|.*", re.DOTALL)
SHORT_FLAG_WIDTH, SHORT_FRAME = 23, 2  # of the short help
SHORT_ELSE = 6  # other lines: around the examples, --help-all, and what the shell prints
SCREEN_LINES = 24  # of a usual terminal; the short help has at most as many, with the prompt

Row = tuple[str, str, str]  # a flag with the placeholder of its value, its help, its default

EXAMPLES = {
    "generate": (
        '"class Codec(codecs.Codec):"',
        '--target LARGE --drafter SMALL --chat "Why is the sky blue?"',
        "--prompt-file prompts.txt --json --policy ar",
        '--temperature 0.8 --seed 7 --show-speculation "import os"',
    ),
    "demo": ("", '--pace 0 --temperature 0 "class Queue:"'),
    "chat": ("--target LARGE --drafter SMALL",),
    "serve": (
        "--target LARGE --drafter SMALL",
        "--host 0.0.0.0 --port 8080 --api-key-file key.txt",
    ),
    "router": ("http://10.0.0.2:8000 http://10.0.0.3:8000",),
    "tune": ("", "--target LARGE --drafter SMALL"),
    "verify-lossless": ("", "--target LARGE --drafter SMALL --policy auto"),
    "experiment": ("policies --report", "policies --limit 4 --set max_tokens=32"),
    "measure": ("", "--target LARGE --drafter SMALL --prompt-file prompts.txt"),
    "plan": (
        "--target-ms 30 --draft-ms 4 --acceptance 0.8",
        "--like llama-3.1-70b --plot plan.png",
    ),
    "testbed": ("--like 0.5b --out testbeds/half-a-billion",),
    "train-head": (
        "--target LARGE --prompt-file prompts.txt --minutes 60 --out my-head",
        "--target LARGE --kind medusa --drafter SMALL --out my-medusa",
    ),
    "trace-summary": ("trace.json --rounds 5-9 --plot rounds.png",),
}


ROOT_FLAGS = "COMMAND --help explains a command; --version prints the version."
# What the help of the program itself begins with.
FIRST_STEPS = (
    "demo",
    'generate "class Codec(codecs.Codec):"',
    "chat --target LARGE --drafter SMALL",
    "serve --target LARGE --drafter SMALL",
)
# The arguments and flags that `--help` shows of a command with many.
FIRST = {
    "generate": (
        *("PROMPT", "--prompt-file", "--chat", "--target", "--drafter", "--temperature"),
        *("--max-tokens", "--seed", "--policy", "--target-device", "--dtype", "--json"),
        "--show-speculation",
    ),
    "demo": ("PROMPT", "--target", "--drafter", "--temperature", "--max-tokens", "--pace"),
    "chat": (
        *("MODEL", "--drafter", "--system", "--temperature"),
        *("--max-tokens", "--policy", "--target-device", "--drafter-device", "--dtype"),
        "--max-model-len",
    ),
    "serve": (
        *("MODEL", "--drafter", "--host", "--port", "--api-key-file"),
        *("--policy", "--target-device", "--drafter-device", "--dtype", "--max-model-len"),
        *("--max-num-seqs", "--gpu-memory-utilization"),
    ),
    "router": ("URL", "--host", "--port", "--api-key-file", "--wait-s", "--drain-timeout-s"),
    "tune": (
        *("--target", "--drafter", "--heads", "--drafter-home", "--target-device"),
        *("--drafter-device", "--dtype", "--drafter-dtype", "--quantization", "--backend"),
    ),
    "verify-lossless": (
        *("--target", "--drafter", "--policy", "--prompt", "--prompt-file", "--num-texts"),
        *("--target-device", "--drafter-device", "--dtype", "--json"),
    ),
    "experiment": (
        *("FILE", "--out", "--prompt-file", "--limit", "--repetitions", "--set", "--report"),
    ),
    "profile": (
        *("--target", "--drafter", "--policy", "--prompt", "--max-tokens", "--target-device"),
        *("--drafter-device", "--dtype"),
    ),
    "measure": (
        *("--target", "--drafter", "--prompt-file", "--num-prompts", "--max-tokens", "--out"),
        *("--target-device", "--drafter-device", "--dtype", "--json"),
    ),
    "testbed": ("--like", "--out", "--drafter-like", "--dtype", "--seed"),
    "plan": (
        *("--pair", "--like", "--target-ms", "--draft-ms", "--acceptance", "--temperature"),
        *("--plot", "--json"),
    ),
    "train-head": (
        *("--out", "--target", "--kind", "--prompt-file", "--minutes", "--drafter", "--device"),
    ),
}


def examples(command: str, program: str) -> str | None:
    """Return the example lines in the help of a command; None if it has none."""
    lines = [
        f"  {program} {command} {arguments}".rstrip() for arguments in EXAMPLES.get(command, ())
    ]
    return "\n".join(lines) if lines else None


class Command(TyperCommand):
    """A command of typer that draws its help with the panels of this file.

    It reads the flags of other programs, too (`foreign.py`).
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line. Raises TyperException for what is unknown."""
        if not ctx.resilient_parsing:
            args = in_our_words(args, known(self, ctx))
        return list(super().parse_args(ctx, args))

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Print the help; `formatter` stays empty, so typer prints nothing more."""
        if self.name in FIRST:
            _show_first(self, ctx)
        else:
            self.show_all(ctx)

    def show_all(self, ctx: Any) -> None:
        """Print the help with all flags."""
        console = _show(self, ctx, _panels(self.get_params(ctx), ctx))
        if self.epilog:
            _show_examples(self.epilog, console)


def known(command: Any, ctx: Any) -> Known:
    """Return what a command's arguments may be."""
    flags: dict[str, Flag] = {}
    arguments = []
    for one in command.get_params(ctx):
        if one.param_type_name != "option":
            arguments.append(one.metavar)
            continue
        value = "" if getattr(one, "is_flag", False) else _value(one, ctx)
        for name in (*one.opts, *one.secondary_opts):
            flags[name] = Flag(one.opts[0], value)
    for name in (one for one in flags if one.startswith("--no-")):
        flags[name] = Flag(name)
    return Known(_path(command, ctx), flags, takes_prompt="PROMPT" in arguments)


def _path(command: Any, ctx: Any) -> str:
    """Return the words of a command behind the program's name: `generate`, `keys new`."""
    if ctx.parent is None:
        return "" if isinstance(command, TyperGroup) else str(command.name or "")
    above = ctx.parent
    return f"{_path(above.command, above)} {ctx.info_name}".strip()


def with_help_all(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the flag that shows its whole help."""

    def show(context: typer.Context, wanted: bool) -> None:
        if wanted:
            context.command.show_all(context)  # type: ignore[attr-defined]
            raise typer.Exit

    option = typer.Option(HELP_ALL, help="Show all flags and exit.", callback=show, is_eager=True)
    flag = inspect.Parameter(
        "help_all",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, option],
    )
    signature = inspect.signature(command, eval_str=True)
    parameters = [*signature.parameters.values(), flag]

    @functools.wraps(command)
    def run(*, help_all: bool = False, **values: Any) -> None:
        del help_all  # `show` has shown it
        command(**values)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


class Program(TyperGroup):
    """A group of commands that draws its help with the panels of this file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words up to the command. Raises TyperException for what is unknown."""
        if args[:1] == [HELP_ALL]:
            args = [ctx.help_option_names[-1]]
        elif args and not ctx.resilient_parsing:
            self._check_first(args[0].partition("=")[0], ctx)
        return list(super().parse_args(ctx, args))

    def _check_first(self, word: str, ctx: Any) -> None:
        """Refuse a flag of a command that stands before the command."""
        own = known(self, ctx).flags
        if word in own or not word.startswith("-"):
            return
        everywhere = {name for one in self.commands.values() for name in known(one, ctx).flags}
        if word in everywhere or word in every_name():
            raise typer.TyperException(
                f"{word} belongs behind a command, such as `{program()} generate {word}` "
                "(one text), chat or serve"
            )

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Print the help, with a list of the commands; `formatter` stays empty."""
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, " ".join((one.help or "").partition("\n\n")[0].split()), "")
            for name, one in found.items()
            if one is not None and not one.hidden
        ]
        if ctx.parent is None:
            _show_usage(self, ctx, console := _console())
            _show_examples("\n".join(f"  {program()} {one}" for one in FIRST_STEPS), console)
            console.print(Padding(Text(ROOT_FLAGS, style="dim"), (0, 1)))
            _show_panels([], rows, console)
        else:
            console = _show(self, ctx, _panels(self.get_params(ctx), ctx), rows)
        if self.epilog:
            console.print(Padding(Text(self.epilog, style="dim"), (0, 1)))


def _show(
    command: Any, ctx: Any, panels: list[tuple[str, list[Row]]], commands: Sequence[Row] = ()
) -> Console:
    """Print the usage, what the command does, and its panels; return the console."""
    console = _console()
    _show_usage(command, ctx, console)
    more = " ".join((command.help or "").partition("\n\n")[2].split())
    if more:
        console.print(Padding(Text(more, style="dim"), (1, 1, 0, 1)))
    _show_panels(panels, commands, console)
    return console


def _console() -> Console:
    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    return console


def _show_usage(command: Any, ctx: Any, console: Console) -> None:
    """Print the usage, and what the command does."""
    usage = BRACES.sub(r"\1", command.get_usage(ctx))
    console.print(Padding(Text(usage, style="bold"), (0, 1)))
    summary = " ".join((command.help or "").partition("\n\n")[0].split())
    console.print(Padding(Text(summary), (0, 1)))


def _show_panels(
    panels: list[tuple[str, list[Row]]], commands: Sequence[Row], console: Console
) -> None:
    """Print the flags in their panels, and the commands."""
    flag_width = FLAG_WIDTH if console.width >= NARROW else 0
    tables: list[tuple[str, Sequence[Row], int]] = [
        (title, rows, flag_width) for title, rows in panels
    ]
    if commands:
        tables.append(("Commands", commands, 1 + max(len(name) for name, *_ in commands)))
    for title, rows, width in tables:
        lines = _lines(rows, width, console)
        console.print(Panel(lines, title=title, title_align="left", border_style="dim"))


def _show_examples(examples: str, console: Console) -> None:
    # Without padding behind a line: a \ at its end must be the last sign when it is pasted.
    made = [line for one in examples.split("\n") for line in continued(one, console.width)]
    console.print(Text("\n".join(("\n Examples:", *made, ""))), soft_wrap=True)


def _show_first(command: Any, ctx: Any) -> None:
    """Print a help of one screen: what the command does, examples, and the flags in FIRST."""
    console = _console()
    shown = {row[0].partition(" ")[0] or row[0].strip(): row for row in rows_of(command, ctx)}
    rows = [_short(shown[name]) for name in FIRST[command.name] if name in shown]
    lines = _lines(rows, SHORT_FLAG_WIDTH, console, SHORT_FRAME)
    with console.capture() as usage:
        _show_usage(command, ctx, console)
    console.print(Text.from_ansi(usage.get().rstrip("\n")))
    room = SCREEN_LINES - usage.get().count("\n") - len(lines.renderables) - SHORT_ELSE
    if command.epilog:
        _show_examples(_that_fit(command.epilog, room, console.width), console)
    console.print(Padding(lines, (0 if command.epilog else 1, 1, 0, 1)))
    number = sum(one.param_type_name == "option" for one in command.get_params(ctx))
    console.print(Padding(Text(f"{HELP_ALL} shows all {number} flags.", style="dim"), (0, 1)))


def _that_fit(examples: str, room: int, width: int) -> str:
    """Return the first examples that fit into so many lines, but at least one."""
    kept: list[str] = []
    for one in examples.split("\n"):
        room -= len(continued(one, width))
        if kept and room < 0:
            break
        kept.append(one)
    return "\n".join(kept)


def _short(row: Row) -> Row:
    """Return a row with the first sentence of its help, and no default."""
    flag, told, _ = row
    found = WHOLE_SENTENCE.match(told)
    return flag, found[0] if found else told, ""


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


def _value(parameter: Any, ctx: Any) -> str:
    """Return the placeholder for a parameter's value."""
    if parameter.metavar is not None:
        return str(parameter.metavar)
    return _placeholder((parameter.display_type_rich(ctx=ctx) or "").strip("<>"))


def _row(parameter: Any, ctx: Any) -> Row:
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else []
    if parameter.name == "help":
        names.sort(key=len)  # typer has them in a set, so in another order each time
    value = "" if getattr(parameter, "is_flag", False) else _value(parameter, ctx)
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


def _lines(
    rows: Sequence[Row], width: int, console: Console, frame_width: int = FRAME_WIDTH
) -> Group:
    """Return a line for each flag, with its help beside it, or below it if the flag is long.

    width        of the column of flags; 0: the help is always below
    frame_width  of what stands left and right of the lines
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
        lines = _wrapped(told, console.width - frame_width - beside, console)
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
