"""`python -m lab.pictures.flags`: write docs/flags.md, all flags of all commands, from the help."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from coordinator.cli import plugins
from coordinator.cli.app import command_line
from coordinator.cli.arguments import HELP_ALL
from coordinator.cli.help import rows_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flags.md"
BEFORE = """\
# All flags

<!-- Made by `.venv/bin/python -m lab.pictures.flags` from the help: change it there. -->

`COMMAND --help-all` shows the same at the terminal. [The command line](command-line.md) explains
the flags that matter most. A flag that several commands have is explained in the first table only.
"""
NOT_HERE = ("--help", HELP_ALL)


def commands(app: typer.Typer) -> Iterator[tuple[str, Any]]:
    """Return every command by its whole name, in the order of the help: `generate`, `keys new`."""
    yield from _below(typer.main.get_command(app), "")


def _below(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    found = getattr(command, "commands", None)
    if found is None:
        yield name, command
        return
    for word, one in found.items():
        yield from _below(one, f"{name} {word}".strip())


def page() -> str:
    """Return the text of the page that lists the flags of all commands."""
    seen = dict[tuple[str, str], tuple[str, str]]()  # a flag, help: first command, its default
    parts = [BEFORE]
    for name, command in sorted(commands(command_line(plugins.commands())), key=_generate_first):
        parts.append(_section(name, command, seen))
    return "\n".join(parts)


def _generate_first(named: tuple[str, Any]) -> bool:
    return named[0] != "generate"


def _section(name: str, command: Any, seen: dict[tuple[str, str], tuple[str, str]]) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    lines, others = [], dict[str, list[str]]()
    for flag, told, default in rows_of(command, context):
        if flag.strip() in NOT_HERE:
            continue
        first, usual = seen.setdefault((flag, told), (name, default))
        if first != name:
            other = f" (default: {_shown(default)})" if default not in ("", usual) else ""
            others.setdefault(first, []).append(f"`{flag.partition(' ')[0].rstrip(',')}`{other}")
        else:
            lines.append(f"| `{_flag(flag)}` | {_cell(told)} | {_shown(default)} |")
    if lines:
        lines = ["| flag | meaning | default |", "|---|---|---|", *lines]
    for first, flags in others.items():
        lines += ["", f"Also these flags of `{first}`: {', '.join(flags)}."]
    about = " ".join((command.help or "").split())
    return "\n".join((f"## {name}", "", about, "", *lines, "")).replace("\n\n\n", "\n\n")


def _flag(flag: str) -> str:
    return flag.strip().replace("|", "\\|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")


def _shown(default: str) -> str:
    return f"`{default}`" if default else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.pictures.flags", description="Writes docs/flags.md from the help."
    )
    parser.parse_args()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
