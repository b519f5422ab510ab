"""Nobody's text steers the terminal of whoever reads it, and in a pipe no byte of it changes."""

import io
import logging
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.params import SamplingParams
from coordinator.cli.app import _Line, run
from coordinator.cli.chat.screen import Pipe, Terminal
from coordinator.cli.harmless import harmless
from coordinator.cli.speculation_view import SpeculationView
from coordinator.cli.writers import ShownPrompt, TextWriter, heading
from coordinator.text.session_events import Emit
from proto.errors import ConfigurationError, NodeError

EVIL = "\x1b]0;title\x07\x1b[2Ja\rb\x9b31m\x7f\x00\n\tc"
SHOWN = "␛]0;title␇␛[2Ja␍b·31m␡␀\n\tc"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Words:
    """A decoder whose only token is the text."""

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [EVIL for _ in tokens]

    def preview(self, tokens: Sequence[int]) -> str:
        return EVIL if tokens else ""

    def finish(self) -> str:
        return ""


def part() -> Any:
    made = SimpleNamespace(index=0, text=EVIL)
    return SimpleNamespace(outputs=[made], prompt_token_ids=(1,))


@given(st.text())
def test_what_is_no_control_character_stays_and_nothing_grows(text: str) -> None:
    shown = harmless(text)
    assert len(shown) == len(text)
    assert harmless(shown) == shown
    for before, after in zip(text, shown, strict=True):
        is_control = before not in "\n\t" and (ord(before) < 32 or 127 <= ord(before) < 160)
        assert (before != after) == is_control


@pytest.mark.parametrize("shows", [False, True])
def test_a_text_is_exact_in_a_pipe_and_harmless_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, *, shows: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for output in (io.StringIO(), Screen()):
        monkeypatch.setattr(sys, "stdout", output)
        writer = TextWriter("ar", SamplingParams(), show_speculation=shows)
        writer._place = ShownPrompt(0, 1, "p", lambda _: Words())  # type: ignore[arg-type,return-value]
        writer.add(Emit((1,), 1, 1, ()), part())
        monkeypatch.undo()
        shown = output.getvalue()
        if not output.isatty():
            assert shown == EVIL
        elif shows:
            assert shown == "".join(f"\x1b[32m{line}\x1b[0m\n" for line in SHOWN.split("\n"))[:-1]
        else:
            assert shown == SHOWN


def test_marks_on_a_terminal_without_colour_are_harmless_too() -> None:
    view = SpeculationView(Words(), in_colour=False, on_terminal=True)  # type: ignore[arg-type]
    assert view.push(Emit((1,), 1, 1, ()), EVIL) == SHOWN
    view = SpeculationView(Words(), in_colour=False)  # type: ignore[arg-type]
    assert view.push(Emit((1,), 1, 1, ()), EVIL) == EVIL


def test_the_prompt_in_a_heading_has_no_control_characters() -> None:
    assert heading(0, 2, EVIL).strip("\n").isprintable()
    assert len(heading(0, 2, EVIL * 9).strip("\n")) == 80


def test_an_answer_of_a_conversation_and_its_notes_are_harmless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, errors = Screen(), io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    console = SimpleNamespace(print=lambda text, **_: errors.write(text.plain))
    terminal = Terminal(None, console)  # type: ignore[arg-type]
    terminal.write(EVIL)
    terminal.note(EVIL)
    monkeypatch.undo()
    assert output.getvalue() == errors.getvalue() == SHOWN


def test_an_answer_in_a_pipe_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(sys, "stdout", output)
    pipe = Pipe()
    pipe.write(EVIL)
    monkeypatch.undo()
    assert output.getvalue() == EVIL


@pytest.mark.parametrize("kind", [ConfigurationError, NodeError])
def test_an_error_quotes_others_without_their_control_characters(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    app = typer.Typer()

    @app.command()
    def fails() -> None:
        raise kind("its last words: \x1b[2J")

    errors = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "stderr", errors)
    run(app)
    monkeypatch.undo()
    assert errors.getvalue() == "error: its last words: ␛[2J\n"
    record = logging.LogRecord("x", logging.WARNING, "", 0, "a node said \x1b[2J", None, None)
    assert _Line("%(message)s").format(record) == "a node said ␛[2J"
