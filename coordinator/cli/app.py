"""The command line. Only the generated text goes to stdout; everything else goes to stderr."""

import logging
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from coordinator.api.refusals import refusal
from coordinator.cli import foreign
from coordinator.cli.arguments import HELP_ALL, full_help, lists, meant, setting
from coordinator.cli.chat.loop import chat
from coordinator.cli.demo import demo
from coordinator.cli.flags import Command
from coordinator.cli.generate import generate
from coordinator.cli.harmless import harmless
from coordinator.cli.help import Command as HelpfulCommand
from coordinator.cli.help import Program, examples, known, with_help_all
from coordinator.cli.keys import keys
from coordinator.cli.plugins import Absent
from coordinator.cli.process import EXIT_FAILED, Interruption, prepare_streams
from coordinator.cli.router import router
from coordinator.cli.serve import VERSION, serve
from coordinator.cli.status import status
from coordinator.cli.tune import tune
from coordinator.cli.wrapping import for_stderr
from coordinator.launching.launcher import ConnectRay
from proto.errors import ConfigurationError, SlipstreamError, did_you_mean, shown
from proto.installation import program
from proto.system import unexplained

# -- mistakes --------------------------------------------------------------------------------------

# Error messages for a command line that cannot be read, with a suggestion of what was meant.

_TOO_MANY = re.compile(r"Got unexpected extra argument\S* \((.*)\)$", re.DOTALL)
_NO_COMMAND = re.compile(r"No such command (.*?)\.(?: Did you mean|$)", re.DOTALL)


def line_of(error: typer.TyperException) -> str:
    """Return the message for an error of the command line in one line, or the help itself."""
    message = str(getattr(error, "format_message", error.__str__)())
    if "Usage:" in message:
        return message
    context: Any = getattr(error, "ctx", None)
    option = getattr(error, "option_name", None)
    if context is not None and isinstance(option, str) and hasattr(error, "possibilities"):
        hint = meant(option, known(context.command, context), None)
        told = f"did you mean {hint}?" if hint else lists(known(context.command, context))
        return f"there is no option {option}; {told}"
    if isinstance(error.__cause__, ValidationError):
        return refusal(_name(getattr(error, "param", None)), error.__cause__.errors(), None)
    if told := _usage(error, message, context):
        return told
    commands: Collection[str] = getattr(getattr(context, "command", None), "commands", ())
    if commands and (found := _NO_COMMAND.match(message)):
        word = found[1].strip("'\"")
        instead = foreign.COMMANDS.get(word, "").replace("{}", program())
        told = f"; {instead}" if instead else _hint(word, commands, _all(commands))
        return f"there is no command {shown(word)}{told}"
    if found := _TOO_MANY.match(message):
        return f"too many arguments: {found[1]}; {_too_many(found[1], context)}"
    return message


def _too_many(words: str, context: Any) -> str:
    """Return what to do about arguments that the command does not take."""
    flag = setting(words.split()[0], known(context.command, context)) if context else ""
    return f"write {flag}" if flag else "a text of several words needs quotes around it"


def _usage(error: typer.TyperException, message: str, context: Any) -> str:
    """Return the message for an option or argument with a missing or unwanted value; else ""."""
    option = getattr(error, "option_name", "")
    if option and message.endswith("requires an argument."):
        help_ = full_help(known(context.command, context)) if context else HELP_ALL
        return f"{option} needs a value; {help_} says which"
    if option and message.endswith("does not take a value."):
        return f"{option} has no value; write it alone"
    if message.startswith("Missing "):
        name, command = _name(getattr(error, "param", None)), known(context.command, context)
        return f"{name} is missing; `{program()} {command.command} --help` says what it is"
    return ""


def _name(parameter: Any) -> str:
    """Return a parameter's name as the help shows it: --max-tokens, FILE."""
    if parameter is None:
        return "a value"
    long = [one for one in parameter.opts if one.startswith("--")]
    return long[0] if long else str(parameter.metavar or parameter.name.upper())


def _hint(word: str, known: Collection[str], else_: str) -> str:
    return did_you_mean(word, known) or f"; {else_}"


def _all(commands: Collection[str]) -> str:
    return f"there are {', '.join(commands)} (to continue a text: {program()} generate TEXT)"


# -- app -------------------------------------------------------------------------------------------

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


def _root(number: str) -> Command:
    """Return the function that runs before any command; `number` is what --version prints."""

    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(f"slipstream {number}")
            raise typer.Exit

    def root(
        context: typer.Context,
        version: Annotated[
            bool,
            typer.Option("--version", help="Print the version.", callback=show, is_eager=True),
        ] = False,
    ) -> None:
        """Distributed speculative decoding: the target's text, sooner."""
        del version  # `show` has printed it
        context.meta[VERSION] = number

    return root


def command_line(plugins: Sequence[Command | Absent], version: str = "") -> typer.Typer:
    """Return the program with all commands; each is named like its function.

    plugins  more commands, and those that cannot be had here
    """
    absent = [one for one in plugins if isinstance(one, Absent)]
    app = typer.Typer(
        name=program(),
        cls=Program,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=_closing(absent),
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        no_args_is_help=True,
    )
    app.callback()(_root(version))
    commands: list[Command | Absent] = [demo, generate, chat, serve, router, status, tune, *plugins]
    for command in commands:
        if isinstance(command, Absent):
            _stand_in(app, command)
            continue
        name = command.__name__.replace("_", "-")
        helpful = app.command(name, cls=HelpfulCommand, epilog=examples(name, program()))
        helpful(with_help_all(command))
    app.add_typer(keys, name="keys")
    return app


def _closing(absent: Sequence[Absent]) -> str | None:
    """Return what the help says below its commands: which others there are, and in what."""
    names: dict[str, list[str]] = {}
    for one in absent:
        names.setdefault(one.brought_by, []).append(one.name)
    lines = [f"More commands come with {by}: {', '.join(some)}." for by, some in names.items()]
    return "\n".join(lines) or None


def _stand_in(app: typer.Typer, absent: Absent) -> None:
    """Add a command that takes any arguments, --help too, and is refused with its line."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @app.command(absent.name, hidden=True, add_help_option=False, context_settings=anything)
    def refuse() -> None:
        raise ConfigurationError(absent.line)


class _Line(logging.Formatter):
    """Formats a log line without control characters, because it may quote other programs."""

    def format(self, record: logging.LogRecord) -> str:
        return for_stderr(harmless(super().format(record)))


def _say(line: str) -> None:
    with suppress(OSError):  # a terminal that is gone: the signal that said so is why we end
        typer.echo(for_stderr(harmless(line)), err=True)


def main(
    connect_ray: ConnectRay | None = None,
    plugins: Sequence[Command | Absent] = (),
    version: str = "",
) -> int:
    """Run the command line; return the exit status. Every error is one line on stderr.

    connect_ray  makes the launcher for `--ray`
    plugins      more commands, and those that cannot be had here
    version      of Slipstream
    """
    prepare_streams()
    lines = logging.StreamHandler()
    lines.setFormatter(_Line("%(message)s"))
    logging.basicConfig(handlers=[lines], level=logging.WARNING)
    interruption, status = Interruption(), EXIT_INTERRUPTED
    # A signal may come just before the first `try` of a command or just after its last one.
    with suppress(KeyboardInterrupt), interruption:
        status = run(command_line(plugins, version), connect_ray)
    if status != EXIT_INTERRUPTED:
        return status
    _say(interruption.line)
    return interruption.status


def run(app: typer.Typer, connect_ray: ConnectRay | None = None) -> int:
    """Run the command that the arguments name; return the exit status. Sets no signal handlers."""
    try:
        if sys.stdout is None:
            raise ConfigurationError("standard output is closed; the text is written there")
        status = app(standalone_mode=False, obj=connect_ray, prog_name=program())
    except typer.TyperException as error:
        if line := line_of(error):  # empty where the help has been shown already
            _say(f"error: {line}")
        return EXIT_USAGE
    except ConfigurationError as error:
        _say(f"error: {error}")
        return EXIT_USAGE
    except SlipstreamError as error:
        _say(f"error: {error}")
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed it, so nobody reads an error message either.
        with suppress(AttributeError):  # there is none, if it was closed at the start
            sys.stderr.close()
        return EXIT_FAILED
    except OSError as error:
        _say(f"error: {unexplained(error)}")
        return EXIT_FAILED
    return status or 0  # on Ctrl-C typer itself may return EXIT_INTERRUPTED
