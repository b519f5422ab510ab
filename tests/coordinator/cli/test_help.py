"""`--help` of every command: it fits, no word is split, and it says what things are called."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from coordinator.cli import plugins
from coordinator.cli.app import command_line
from coordinator.cli.help import EXAMPLES, FIRST, HELP_ALL, examples, rows_of
from lab.pictures.flags import commands
from proto.installation import program

PROGRAM = program()
APP = command_line(plugins.commands())
COMMANDS = dict(commands(APP))
GROUPS = ("", "keys")
FRAME = "│╭╮╰╯─"
JSON = re.compile(r"\{\"[^}]*\}")  # an example of a value
# What may stand for a value; another word has to be plain, too, before it is added.
PLACES = re.compile(
    r"|[A-Z]+(,\.\.\.)?|ID:BIAS,\.\.\.|NAME=VALUE(,\.\.\.)?|NODE:DELAY,\.\.\.|FIRST-LAST"
    r"|[a-z0-9]+(\|[a-z0-9]+)+"
)


def shown_help(command: str, width: int, flag: str = "") -> str:
    flag = flag or ("--help" if command.startswith("keys") else HELP_ALL)
    done = CliRunner().invoke(
        APP, [*command.split(), flag], env={"COLUMNS": str(width)}, prog_name=PROGRAM
    )
    assert done.exit_code == 0
    return done.output


def rows(name: str) -> list[tuple[str, str, str]]:
    """The flags of a command, with help and default."""
    command = COMMANDS[name]
    return rows_of(command, command.make_context(name, [], resilient_parsing=True))


def words(text: str) -> str:
    """The words alone: without frames and line ends."""
    return " ".join(text.translate(str.maketrans(FRAME, " " * len(FRAME))).split())


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", [*COMMANDS, *GROUPS])
def test_the_help_fits_and_no_word_is_split(name: str, width: int) -> None:
    shown = shown_help(name, width)
    assert max(map(len, shown.splitlines())) <= width
    assert str(Path.cwd()) not in shown
    assert not re.search(r"[{}<…]|\[\]", JSON.sub("", shown))
    told = words(shown)
    for flag, text, default in rows(name) if name in COMMANDS else ():
        default = f" [default: {default}]" if default else ""
        if width == 60:  # a word that is longer than a line has to be broken
            text = re.sub(r"\S{50,}", "", text)
        assert f"{words(flag)} {words(text)}{default}" in told


def test_a_word_that_is_split_is_found() -> None:
    assert words("│ it is se│\n│ en        │") != words("it is seen")


@pytest.mark.parametrize("name", COMMANDS)
def test_values_are_called_what_they_are(name: str) -> None:
    for flag, _, _ in rows(name):
        value = flag.split(" ")[-1] if not flag.endswith(" ") else ""
        value = "" if value.startswith("--") else value
        assert PLACES.fullmatch(value), flag
        assert value not in ("PATH", "STR", "INT", "FLOAT", "PATH,...", "BOOL"), flag


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_is_a_sentence_and_begins_with_a_short_one(name: str) -> None:
    for flag, text, _ in rows(name):
        assert text[:1].isupper(), f"{flag}: {text}"
        assert text.endswith("."), f"{flag}: {text}"
        first = re.split(r"(?<=[.:;])\s", text)[0]
        assert len(first) <= 60, f"{flag}: {first}"
        # What leans on the sentence before is no sentence.
        for sentence in re.findall(r"(?:^|\. )(\S+)", text):
            assert sentence not in ("And", "But", "Of", "As", "Or", "So"), f"{flag}: {text}"


def test_two_flags_of_a_command_do_not_have_the_same_help() -> None:
    for name in COMMANDS:
        told = [text for _, text, _ in rows(name)]
        assert sorted(told) == sorted(set(told)), name


def test_the_help_of_generate_has_its_panels_in_order_and_ends_with_examples() -> None:
    shown = shown_help("generate", 80, HELP_ALL)
    titles = re.findall(r"╭─ ([A-Z][a-z ]+) ─", shown)
    assert titles[1:6] == ["Models", "Sampling", "Speculation", "Devices", "Output"]
    assert len(titles) == len(set(titles))
    ending = shown[shown.rindex("╯") :]
    assert "Examples:" in ending
    assert "python -m coordinator generate" in ending
    assert "smollm2 where `make demo` has fetched it" in " ".join(shown.replace("│", "").split())


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_can_be_copied_and_are_read(name: str, width: int) -> None:
    ending = shown_help(name, width).partition(" Examples:\n")[2]
    lines = ending.rstrip("\n").replace("\\\n", "").splitlines()
    assert [line.split() for line in lines] == [
        line.split() for line in str(examples(name, PROGRAM)).splitlines()
    ]
    for line in lines:
        command, *arguments = shlex.split(line.removeprefix(f"  {PROGRAM} "))
        assert COMMANDS[command].make_context(command, arguments).params


@pytest.mark.parametrize("name", FIRST)
def test_the_short_help_fits_a_screen_and_begins_with_examples(name: str) -> None:
    shown = shown_help(name, 80, "--help")
    lines = shown.splitlines()
    assert len(lines) <= 23, "and the prompt of the shell"
    assert max(map(len, lines)) <= 80
    assert shown_help(name, 80, "-h") == shown
    assert lines[0].startswith(f" Usage: {PROGRAM} {name} ")
    flags = rows(name)
    places = [shown.index(f"\n {flag}") for flag in FIRST[name]]
    assert places == sorted(places)
    if name in EXAMPLES:
        assert shown.index("Examples:") < places[0]
    known = {flag.partition(" ")[0] or flag for flag, _, _ in flags}
    assert set(FIRST[name]) <= known
    number = sum(flag.startswith("-") for flag, _, _ in flags)
    assert shown.rstrip().splitlines()[-1].strip() == f"--help-all shows all {number} flags."


def test_every_command_with_many_flags_has_a_short_help() -> None:
    for name in COMMANDS:
        lines = shown_help(name, 80, "--help").splitlines()
        assert len(lines) <= 23, name


def test_the_programs_help_begins_with_examples_and_names_every_command() -> None:
    shown = shown_help("", 80, "--help")
    assert shown == shown_help("", 80, "-h") == shown_help("", 80, HELP_ALL)
    assert shown.index("Examples:") < shown.index("Commands")
    assert f"  {PROGRAM} demo\n" in shown


def test_an_example_that_has_no_such_flag_is_found() -> None:
    command: Any = COMMANDS["generate"]
    with pytest.raises(typer.TyperException, match="--wibble"):
        command.make_context("generate", ["--wibble"])
