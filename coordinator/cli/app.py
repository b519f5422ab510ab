"""The command line. Text goes to stdout and nothing else does; all else goes to stderr."""

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from coordinator.cli.chat.command import chat
from coordinator.cli.demo.command import demo
from coordinator.cli.flags import Command
from coordinator.cli.generate import generate
from coordinator.cli.harmless import harmless
from coordinator.cli.keys import keys
from coordinator.cli.mistakes import line_of
from coordinator.cli.process import EXIT_FAILED, Interruption, prepare_streams
from coordinator.cli.screens.help import Command as HelpfulCommand
from coordinator.cli.screens.help import Program, examples
from coordinator.cli.status.command import status
from coordinator.cli.verify_lossless import verify_lossless
from coordinator.launching.launcher import ConnectRay
from proto.errors import ConfigurationError, SlipstreamError
from proto.system_errors import unexplained

VERSION = "0.1.0"
PROGRAM = "python -m coordinator"
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


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


class _Line(logging.Formatter):
    """What is logged may quote others: a path, the last words of a node."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def _say(line: str) -> None:
    with suppress(OSError):  # a terminal that is gone: the signal that said so is why we end
        typer.echo(harmless(line), err=True)


def main(connect_ray: ConnectRay | None = None, measurements: Sequence[Command] = ()) -> int:
    """Run the command line; every error of a user or a peer is one line on stderr.

    connect_ray   called for `--ray`
    measurements  more commands; both are handed in because this package does not know `deploy`
    """
    prepare_streams()
    lines = logging.StreamHandler()
    lines.setFormatter(_Line("%(message)s"))
    logging.basicConfig(handlers=[lines], level=logging.WARNING)
    interruption, status = Interruption(), EXIT_INTERRUPTED
    # A signal may come just before the first `try` of a command or just after its last.
    with suppress(KeyboardInterrupt), interruption:
        status = run(command_line(measurements), connect_ray)
    if status != EXIT_INTERRUPTED:
        return status
    _say(interruption.line)
    return interruption.status


def run(app: typer.Typer, connect_ray: ConnectRay | None = None) -> int:
    """Run what the arguments say; returns the exit status. Signals are as the caller has them."""
    try:
        if sys.stdout is None:
            raise ConfigurationError("standard output is closed; the text is written there")
        status = app(standalone_mode=False, obj=connect_ray)
    except typer.TyperException as error:
        if line := line_of(error):  # without a command the help has been shown, and that is all
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
        # Whoever read our output has gone; what is left to say has nobody to hear it.
        sys.stderr.close()
        return EXIT_FAILED
    except OSError as error:
        _say(f"error: {unexplained(error)}")
        return EXIT_FAILED
    return status or 0  # typer makes EXIT_INTERRUPTED of Ctrl-C as well, and returns it
