"""What is said of a command line that cannot be read: the library's line, and what was meant."""

import re
from collections.abc import Collection
from typing import Any

import typer

from proto.errors import did_you_mean, shown

PROGRAM = "python -m coordinator"
_TOO_MANY = re.compile(r"Got unexpected extra argument\S* \((.*)\)$", re.DOTALL)
_NO_COMMAND = re.compile(r"No such command (.*?)\.(?: Did you mean|$)", re.DOTALL)


def line_of(error: typer.TyperException) -> str:
    """One line; or the help itself, which is all that is said where there is no command."""
    message = str(getattr(error, "format_message", error.__str__)())
    if "Usage:" in message:
        return message
    context: Any = getattr(error, "ctx", None)
    option = getattr(error, "option_name", None)
    if context is not None and isinstance(option, str) and hasattr(error, "possibilities"):
        return f"there is no option {option}{_hint(option, _options(context), _help_of(context))}"
    commands: Collection[str] = getattr(getattr(context, "command", None), "commands", ())
    if commands and (found := _NO_COMMAND.match(message)):
        word = found[1].strip("'\"")
        return f"there is no command {shown(word)}{_hint(word, commands, _all(commands))}"
    if found := _TOO_MANY.match(message):
        return f"too many arguments: {found[1]}; a text of several words needs quotes around it"
    return message


def _options(context: Any) -> list[str]:
    return [option for one in context.command.params for option in (*one.opts, *one.secondary_opts)]


def _hint(word: str, known: Collection[str], else_: str) -> str:
    return did_you_mean(word, known) or f"; {else_}"


def _help_of(context: Any) -> str:
    command = "" if context.parent is None else f"{context.info_name} "
    return f"`{command}--help` lists them"


def _all(commands: Collection[str]) -> str:
    return f"there are {', '.join(commands)} (to continue a text: {PROGRAM} generate TEXT)"
