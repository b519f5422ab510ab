"""The command line. Text goes to stdout and nothing else does; all else goes to stderr."""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, NoReturn

import typer

from coordinator.cli.chat.command import chat
from coordinator.cli.demo.command import demo
from coordinator.cli.flags import Command
from coordinator.cli.generate import generate
from coordinator.cli.harmless import harmless
from coordinator.cli.keys import keys
from coordinator.cli.mistakes import line_of
from coordinator.cli.screens.help import Command as HelpfulCommand
from coordinator.cli.screens.help import Program, examples
from coordinator.cli.status.command import status
from coordinator.cli.verify_lossless import verify_lossless
from coordinator.launching.launcher import ConnectRay
from proto.errors import ConfigurationError, SlipstreamError
from proto.system_errors import unexplained

VERSION = "0.1.0"
PROGRAM = "python -m coordinator"
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {VERSION}")
        raise typer.Exit


def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Distributed speculative decoding: the target's text, sooner."""


def command_line(measurements: Sequence[Command]) -> typer.Typer:
    """All commands, each called like its function."""
    app = typer.Typer(
        name=PROGRAM,
        cls=Program,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        no_args_is_help=True,
    )
    app.callback()(root)
    commands: list[Command] = [demo, generate, chat, status, verify_lossless, *measurements]
    for command in commands:
        name = command.__name__.replace("_", "-")
        app.command(name, cls=HelpfulCommand, epilog=examples(name, PROGRAM))(command)
    app.add_typer(keys, name="keys")
    return app


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)  # a second one would cut the cleaning up short
    raise KeyboardInterrupt


def _fill_standard_descriptors() -> None:
    """Open those that are closed: a socket would get their number, and what is printed there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


class _Line(logging.Formatter):
    """What is logged may quote others: a path, the last words of a node."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def _say(line: str) -> None:
    typer.echo(f"error: {harmless(line)}", err=True)


def main(connect_ray: ConnectRay | None = None, measurements: Sequence[Command] = ()) -> int:
    """Run the command line; every error of a user or a peer is one line on stderr.

    connect_ray   called for `--ray`
    measurements  more commands; both are handed in because this package does not know `deploy`
    """
    _fill_standard_descriptors()
    lines = logging.StreamHandler()
    lines.setFormatter(_Line("%(message)s"))
    logging.basicConfig(handlers=[lines], level=logging.WARNING)
    # Under nohup, for one, a signal is ignored and stays so.
    numbers = [n for n in INTERRUPTS if signal.getsignal(n) is not signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, _interrupt)
    try:
        return run(command_line(measurements), connect_ray)
    finally:
        # Python's own end flushes output, perhaps into a pipe that nobody reads.
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def run(app: typer.Typer, connect_ray: ConnectRay | None = None) -> int:
    """Run what the arguments say; returns the exit status. Signals are as the caller has them."""
    try:
        if sys.stdout is None:
            raise ConfigurationError("standard output is closed; the text is written there")
        status = app(standalone_mode=False, obj=connect_ray)
    except typer.TyperException as error:
        if line := line_of(error):  # without a command the help has been shown, and that is all
            _say(line)
        return EXIT_USAGE
    except ConfigurationError as error:
        _say(str(error))
        return EXIT_USAGE
    except SlipstreamError as error:
        _say(str(error))
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; what is left to say has nobody to hear it.
        sys.stderr.close()
        return EXIT_FAILED
    except OSError as error:
        _say(unexplained(error))
        return EXIT_FAILED
    # typer turns Ctrl-C into this status and returns it.
    if status == EXIT_INTERRUPTED:
        typer.echo("interrupted", err=True)
    return status or 0
