"""What is typed at a terminal while an answer is written is read after it."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.terminal import AtTerminal

PROGRAM = """
import ctypes, readline, sys, time
from rich.console import Console
from coordinator.cli.chat.answer import Interrupts
from coordinator.cli.chat.screen import Terminal, typed
from coordinator.cli.chat.answer import LineInterruptedError
if "pause" in sys.argv:  # until a signal comes, between the prompt and the wait for a key
    library, libc = ctypes.CDLL(readline.__file__), ctypes.CDLL(None)
    hook = ctypes.c_void_p.in_dll(library, "rl_pre_input_hook")
    hook.value = ctypes.cast(libc.pause, ctypes.c_void_p).value
with Interrupts(lambda: None, typed) as interrupts:
    screen = Terminal(interrupts, Console(stderr=True))
    stopped = []
    with screen.answering(lambda: stopped.append(1)):
        print("answering", flush=True)
        end = time.monotonic() + 30
        while "next" not in sys.argv and not stopped and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.5)
    print("read next", flush=True)
    while True:
        try:
            line = screen.read(is_more=False)
        except LineInterruptedError as error:
            print("interrupted", repr(error.line), flush=True)
            continue
        print("line", repr(line), flush=True)
        if line in (None, "/quit"):
            break
"""


@pytest.fixture
def program(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[AtTerminal]:
    arguments = getattr(request, "param", ())
    terminal = AtTerminal([sys.executable, "-c", PROGRAM, *arguments], tmp_path)
    terminal.wait_for("answering")
    yield terminal
    terminal.kill()


@pytest.mark.parametrize("program", [("next",)], indirect=True)
@pytest.mark.parametrize(
    ("keys", "line"), [("\x04", "None"), ("/quit\n", "'/quit'")], ids=["ctrl-d", "quit"]
)
def test_the_end_that_is_typed_during_an_answer_is_obeyed_after_it(
    program: AtTerminal, keys: str, line: str
) -> None:
    program.type(keys)
    program.wait_for(f"line {line}", program.wait_for("read next"))
    assert program.end() == 0


@pytest.mark.parametrize("keys", ["\x03\x04", "/quit\n\x03"], ids=["then", "before"])
def test_ctrl_c_does_not_throw_away_the_end_that_was_typed(program: AtTerminal, keys: str) -> None:
    for key in keys:
        program.type(key)
    program.wait_for("line ", program.wait_for("read next"))
    assert program.end() == 0


def test_the_presses_of_a_burst_that_stopped_an_answer_do_not_interrupt_the_next_line(
    program: AtTerminal,
) -> None:
    program.type("\x03\x03")
    end = program.wait_for("read next")
    for _ in range(3):
        program.type("\x03")
        time.sleep(0.1)
    program.type("hello\n")
    program.wait_for("line 'hello'", end)
    assert "interrupted" not in program.shown
    program.type("/quit\n")
    assert program.end() == 0


@pytest.mark.parametrize("program", [("next", "pause")], indirect=True)
def test_ctrl_c_that_comes_right_behind_the_prompt_is_heard(program: AtTerminal) -> None:
    end = program.wait_for("read next")
    for _ in range(3):
        start = program.wait_for("\r\n> ", end)
        program.type("\x03")
        end = program.wait_for("interrupted ''", start)
    program.type("/quit\n")
    assert program.end() == 0
