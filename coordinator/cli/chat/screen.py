"""What a conversation reads and shows: with a person at a terminal, or in a pipe.

Answers go to standard output and nothing else does. All else goes to standard error.
"""

import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol

from rich.console import Console
from rich.text import Text

from coordinator.cli.chat.answer import Interrupts, LineInterruptedError
from coordinator.cli.harmless import harmless
from coordinator.cli.writers import for_reader
from proto.errors import ConfigurationError, OutputError
from proto.system import cannot_write

with suppress(ImportError):
    import readline  # noqa: F401 - `input` edits lines and remembers them with it

PROMPT, MORE = "> ", "... "
LOCAL_MODES, CHARACTERS = 3, 6  # of what termios tells of a terminal
MAX_LINE = 1 << 24  # characters
# Nothing is lost of what is no UTF-8, so that it can be named when it is refused.
ERRORS = "surrogateescape"
TWICE = "Ctrl-C again or Ctrl-D ends the conversation; /help lists what can be typed"


def typed() -> str:
    """What has been typed of the line that is read; empty where that cannot be said."""
    module = sys.modules.get("readline")
    return module.get_line_buffer() if module is not None else ""


class Screen(Protocol):
    """Where lines come from and answers go.

    is_person  somebody sees what is said of a message, and can do something else
    """

    is_person: bool

    def read(self, *, is_more: bool) -> str | None:
        """The next line; None: there is none. Raises LineInterruptedError, at a terminal."""

    def answering(self, stop: Callable[[], None]) -> AbstractContextManager[None]:
        """While an answer is written, Ctrl-C stops it."""

    def waiting(self, words: str) -> AbstractContextManager[object]:
        """Until the first token has come, these words show."""

    def write(self, text: str) -> None:
        """Some of an answer. Raises OutputError, BrokenPipeError."""

    def end_answer(self, *, is_empty: bool) -> None:
        """That was all of it."""

    def note(self, line: str) -> None:
        """Say something that is no answer."""


class _Output:
    """Standard output, and whether a line is open in it."""

    def __init__(self) -> None:
        self._ends_line = True  # what was written last ended with a newline

    def write(self, text: str) -> None:
        if not text:
            return
        try:
            sys.stdout.write(for_reader(text))
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"cannot write to standard output: {cannot_write(error)}") from error
        self._ends_line = text.endswith("\n")

    def end_answer(self, *, is_empty: bool) -> None:
        if is_empty or not self._ends_line:
            self.write("\n")


class Terminal:
    """A person types the lines."""

    is_person = True

    def __init__(self, interrupts: Interrupts, console: Console) -> None:
        self._interrupts = interrupts
        self._console = console
        self._output = _Output()
        sys.stdin.reconfigure(errors=ERRORS)  # type: ignore[union-attr]

    def read(self, *, is_more: bool) -> str | None:
        prompt = MORE if is_more else PROMPT
        try:
            with self._interrupts.reading():
                if sys.stdout.isatty():
                    return input(prompt)
                # `input` would write the prompt among the answers.
                self._console.print(prompt, end="", markup=False, highlight=False)
                return _stripped(sys.stdin.readline(MAX_LINE))
        except EOFError:
            return None
        except LineInterruptedError:
            self._console.print()
            raise

    @contextmanager
    def answering(self, stop: Callable[[], None]) -> Iterator[None]:
        with _typed_ahead(), self._interrupts.answering(stop):
            yield

    def waiting(self, words: str) -> AbstractContextManager[object]:
        return self._console.status(words) if self._console.is_terminal else nullcontext()

    def write(self, text: str) -> None:
        self._output.write(text)

    def end_answer(self, *, is_empty: bool) -> None:
        self._output.end_answer(is_empty=is_empty)

    def note(self, line: str) -> None:
        # As it is: a path or a number in it has no colour of its own, and no line is broken.
        self._console.print(Text(harmless(line), style="dim"), soft_wrap=True)


@contextmanager
def _typed_ahead() -> Iterator[None]:
    """What is typed meanwhile is kept for the next line.

    By itself Ctrl-C throws it away, and Ctrl-D before `input` reads with readline is lost: there it
    must come as a character, and is one while it has no meaning of its own.
    """
    try:
        before = termios.tcgetattr(sys.stdin)
        changed = termios.tcgetattr(sys.stdin)
        changed[LOCAL_MODES] |= termios.NOFLSH
        if "readline" in sys.modules and sys.stdout.isatty():
            changed[CHARACTERS][termios.VEOF] = b"\0"
        termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
    except (termios.error, ValueError):  # it is gone
        yield
        return
    try:
        yield
    finally:
        with suppress(termios.error, ValueError):
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class Pipe:
    """Every line of standard input is a turn."""

    is_person = False

    def __init__(self) -> None:
        self._output = _Output()
        if sys.stdin is None:
            raise ConfigurationError("standard input is closed; a conversation reads it")
        sys.stdin.reconfigure(encoding="utf-8", errors=ERRORS)  # type: ignore[union-attr]

    def read(self, *, is_more: bool) -> str | None:  # noqa: ARG002 - nobody is asked
        line = sys.stdin.readline(MAX_LINE + 1)
        if len(line) > MAX_LINE:
            raise ConfigurationError(
                f"standard input has a line of more than {MAX_LINE} characters; split it"
            )
        return _stripped(line)

    def answering(self, stop: Callable[[], None]) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()  # Ctrl-C ends the program, as ever

    def waiting(self, words: str) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def write(self, text: str) -> None:
        self._output.write(text)

    def end_answer(self, *, is_empty: bool) -> None:
        self._output.end_answer(is_empty=is_empty)

    def note(self, line: str) -> None:
        sys.stderr.write(harmless(line) + "\n")


def _stripped(line: str) -> str | None:
    """A line without its end; None if nothing was read."""
    return line.removesuffix("\n").removesuffix("\r") if line else None
