"""Every command in the documentation is one that exists, with flags that it has; nothing is run.

And every flag that there is stands in docs/flags.md, as the help has it.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from coordinator.cli import plugins
from coordinator.cli.app import command_line
from lab.pictures import flags
from node import joining
from proto.messages import Role
from tests.architecture.sources import ROOT
from tests.docs.test_links import PAGES, name_of

OLD = ("LOG.md",)  # a diary: its commands are those of their day
# A line of a block, or what stands between backticks, that begins with a program of ours.
STARTS = r"(?:(?:[A-Z_]+=\S+ )*(?:(?:\S*/)?python3? -m |(?:\.venv/bin/)?slipstream |make ))"
BLOCK = re.compile(rf"^(?: {{4}}|\$ )?({STARTS}(?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)
INLINE = re.compile(rf"`({STARTS}[^`\n]+)`")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OURS = ("coordinator", "slipstream", "target_node", "drafter_node", "lab", "deploy", "tests")
# What a reader puts there, where the command reads a number.
NUMBERS = re.compile(r"\b(?:N|SECONDS|MS)\b")


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """The commands of a page, and whether each is whole: one in a sentence may be a part."""
    for found in BLOCK.findall(text):
        command = " ".join(found.replace("\\\n", " ").split("  #")[0].split())
        # One that is quoted for another command ends with that quote.
        yield command.removesuffix("'") if command.count("'") % 2 else command, True
    for found in INLINE.findall(re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)):
        if not re.match(r"slipstream (?:on|has) ", found):  # the beginning of a message
            yield found, False


def wrong(command: str, *, is_whole: bool) -> str:
    """What is wrong with a command of a page; empty: nothing."""
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if words[0] == "make":
        return _wrong_recipe(words[1:])
    module, *arguments = words[2:] if words[1] == "-m" else ["slipstream", *words[1:]]
    if module.partition(".")[0] not in OURS:
        return ""  # another's
    if module in ("coordinator", "slipstream"):
        return _wrong_arguments(APP, arguments, is_whole=is_whole)
    if module in NODES:
        return _wrong_arguments(NODES[module], arguments, is_whole=is_whole)
    return _wrong_module(module, command)


def _wrong_recipe(words: list[str]) -> str:
    recipes = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    unknown = [word for word in words if re.fullmatch("[a-z-]+", word) and word not in recipes]
    return f"there is no recipe {unknown[0]}" if unknown else ""


def _wrong_arguments(command: Any, arguments: list[str], *, is_whole: bool) -> str:
    while hasattr(command, "commands"):
        if not arguments or arguments[0].startswith("-") or arguments[0].isupper():
            return ""  # `python -m coordinator` itself
        name, *arguments = arguments
        if name not in command.commands:
            return f"there is no command {name}"
        command = command.commands[name]
    known = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    unknown = [
        flag
        for flag in FLAG.findall(" ".join(arguments))
        if flag not in (*known, "--help", "--help-all")
    ]
    if unknown:
        return f"there is no flag {unknown[0]}"
    if not is_whole or "--help" in arguments or "..." in arguments:
        return ""
    try:
        command.make_context("", [NUMBERS.sub("2", one) for one in arguments])
    except typer.TyperException as error:
        return str(error)
    return ""


def _wrong_module(module: str, command: str) -> str:
    """Of a program whose parser is made when it runs: its flags stand in its source."""
    path = ROOT / module.replace(".", "/")
    file = next(
        (one for one in (path.with_suffix(".py"), path / "__main__.py") if one.exists()), None
    )
    if file is None or importlib.util.find_spec(module) is None:
        return f"there is no module {module}"
    source = file.read_text("utf-8")
    if "ArgumentParser(" not in source and "Typer(" not in source:
        return "" if not FLAG.findall(command) else f"{module} reads no flags"
    unknown = [flag for flag in FLAG.findall(command) if not _is_in(flag, source)]
    return f"{module} has no flag {unknown[0]}" if unknown else ""


def _is_in(flag: str, source: str) -> bool:
    name = flag.removeprefix("--").replace("-", "_")
    return f'"{flag}"' in source or f" {name}: " in source or flag == "--help"


def no_engine() -> Any:
    """What would load a model: it is not asked to."""
    raise AssertionError


APP: Any = typer.main.get_command(command_line(plugins.commands()))
NODES = {
    f"{role}_node": typer.main.get_command(joining.command_line(role, no_engine)) for role in Role
}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OLD], ids=name_of)
def test_every_command_of_a_page_can_be_typed(page: Path) -> None:
    found = [
        f"{command}: {why}"
        for command, is_whole in commands(page.read_text("utf-8"))
        if (why := wrong(command, is_whole=is_whole))
    ]
    assert found == []


def test_commands_are_found_in_blocks_in_sentences_and_over_several_lines() -> None:
    text = (
        "Type `make demo` or\n\n    .venv/bin/python -m coordinator plan --target-ms 3 \\\n"
        "        --draft-ms 2  # a comment\n\n```\n$ slipstream status --json\n```\n"
    )
    assert sorted(commands(text)) == [
        (".venv/bin/python -m coordinator plan --target-ms 3 --draft-ms 2", True),
        ("make demo", False),
        ("slipstream status --json", True),
    ]
    assert sum(len(list(commands(page.read_text("utf-8")))) for page in PAGES) > 80


def test_commands_that_do_not_exist_are_found() -> None:
    for command, why in (
        ("make tea", "there is no recipe tea"),
        ("python -m coordinator brew", "there is no command brew"),
        ("python -m coordinator generate --wibble", "there is no flag --wibble"),
        ("python -m coordinator plan --target-ms many", "valid number"),
        ("python -m coordinator trace-summary", "Missing"),
        ("slipstream keys new DIR --wibble", "there is no flag --wibble"),
        ("python -m target_node --wibble", "there is no flag --wibble"),
        ("python -m lab.measure.tea", "there is no module lab.measure.tea"),
        ("python -m lab.measure.soak --wibble", "lab.measure.soak has no flag --wibble"),
    ):
        assert why in wrong(command, is_whole=True), command
    for command in (
        "make sim SEED=7",
        "python -m coordinator plan --target-ms 3 --draft-ms 2",
        "CUDA_VISIBLE_DEVICES= .venv/bin/python -m coordinator status",
        "python -m drafter_node --join tcp://a:1 --keys keys",
    ):
        assert wrong(command, is_whole=True) == ""


def test_every_program_of_the_lab_that_runs_has_a_help() -> None:
    """What the documentation names is read by a parser, which answers to --help."""
    named = {
        found
        for page in PAGES
        for command, _ in commands(page.read_text("utf-8"))
        for found in re.findall(r"-m (lab\.[\w.]+)", command)
        if page.name not in OLD
    }
    assert len(named) >= 5
    for module in named:
        path = ROOT / module.replace(".", "/")
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert re.search(r"(ArgumentParser|Typer)\(", file.read_text("utf-8")), module


def test_every_flag_of_every_command_is_documented() -> None:
    page = flags.PAGE.read_text("utf-8")
    for name, command in flags.commands(command_line(plugins.commands())):
        assert f"\n## {name}\n" in page
        for one in command.params:
            for flag in one.opts:
                is_listed = flag.startswith("--") and flag not in flags.NOT_HERE
                assert not is_listed or re.search(rf"`{flag}[ `,]", page), flag


def test_the_page_of_all_flags_says_what_the_help_says_today() -> None:
    assert flags.page() == flags.PAGE.read_text("utf-8"), "run `python -m lab.pictures.flags`"
