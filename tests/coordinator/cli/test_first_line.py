"""The first line on a terminal, before the imports that take a second."""

import os
import pty
import subprocess
import sys

import pytest

from coordinator.cli import first_line
from coordinator.cli.app import command_line
from coordinator.cli.plugins import COMMANDS
from tests.programs import ROOT

# The command line, which ends itself at the first import of a module that takes time.
UNTIL_A_SLOW_IMPORT = """
import builtins, os, runpy, sys
real = builtins.__import__
def end(name, *rest, **more):
    if name.partition(".")[0] in ("typer", "pydantic", "rich", "tokenizers"): os._exit(7)
    return real(name, *rest, **more)
builtins.__import__ = end
runpy.run_module("coordinator.__main__", run_name="__main__")
"""


def said(*words: str, at_terminal: bool) -> str:
    """What the program writes to stderr before its first slow import."""
    ours, theirs = pty.openpty() if at_terminal else os.pipe()
    command = [sys.executable, "-c", UNTIL_A_SLOW_IMPORT, *words]
    done = subprocess.run(command, cwd=ROOT, stderr=theirs, timeout=60, check=False)
    assert done.returncode == 7
    os.set_blocking(ours, False)
    try:
        return os.read(ours, 4096).decode()
    except BlockingIOError:
        return ""
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("words", [("generate", "import os"), ("serve",), ("demo", "--pace", "0")])
def test_a_command_that_loads_models_says_so_before_its_imports(words: tuple[str, ...]) -> None:
    assert said(*words, at_terminal=True) == first_line.LINE + "\r\n"


@pytest.mark.parametrize("words", [("generate", "--help"), ("status",), ("--version",), ()])
def test_what_answers_at_once_needs_no_such_line(words: tuple[str, ...]) -> None:
    assert said(*words, at_terminal=True) == ""


def test_there_is_no_such_line_in_a_file() -> None:
    assert said("generate", "import os", at_terminal=False) == ""


def test_every_slow_command_is_one_of_the_program() -> None:
    named = {one.name for one in command_line(()).registered_commands}
    assert set(first_line.SLOW) <= named | set(COMMANDS)
