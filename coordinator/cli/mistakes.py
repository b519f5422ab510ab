"""What is said of a command line that cannot be read, and what was probably meant."""

import re
from collections.abc import Collection
from typing import Any

import typer
from pydantic import ValidationError

from coordinator.api.refusals import refusal
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
    if isinstance(error.__cause__, ValidationError):
        return refusal(_name(getattr(error, "param", None)), error.__cause__.errors(), None)
    if told := _usage(error, message, context):
        return told
    commands: Collection[str] = getattr(getattr(context, "command", None), "commands", ())
    if commands and (found := _NO_COMMAND.match(message)):
        word = found[1].strip("'\"")
        return f"there is no command {shown(word)}{_hint(word, commands, _all(commands))}"
    if found := _TOO_MANY.match(message):
        return f"too many arguments: {found[1]}; a text of several words needs quotes around it"
    return message


def _usage(error: typer.TyperException, message: str, context: Any) -> str:
    """Of an option or an argument that lacks what it needs, or has too much; empty: of neither."""
    option = getattr(error, "option_name", "")
    if option and message.endswith("requires an argument."):
        return f"{option} needs a value; --help says which"
    if option and message.endswith("does not take a value."):
        return f"{option} has no value; write it alone"
    if message.startswith("Missing "):
        name = _name(getattr(error, "param", None))
        return f"{name} is missing; `{_command(context)}--help` says what it is"
    return ""


def _name(parameter: Any) -> str:
    """As it stands in the help: --max-tokens, FILE."""
    if parameter is None:
        return "a value"
    long = [one for one in parameter.opts if one.startswith("--")]
    return long[0] if long else str(parameter.metavar or parameter.name.upper())


def _options(context: Any) -> list[str]:
    return [option for one in context.command.params for option in (*one.opts, *one.secondary_opts)]


def _hint(word: str, known: Collection[str], else_: str) -> str:
    return did_you_mean(word, known) or f"; {else_}"


def _help_of(context: Any) -> str:
    return f"`{_command(context)}--help` lists them"


def _command(context: Any) -> str:
    if context.parent is None:
        return ""
    return f"{_command(context.parent)}{context.info_name} "


def _all(commands: Collection[str]) -> str:
    return f"there are {', '.join(commands)} (to continue a text: {PROGRAM} generate TEXT)"
