"""Where a conversation is read and shown: with a person at a terminal, or in a pipe.

Only answers go to standard output. Everything else goes to standard error.
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
    import readline  # noqa: F401 - `input` uses it to edit lines and for the history

PROMPT, MORE = "> ", "... "
LOCAL_MODES, CHARACTERS = 3, 6  # indices in the attributes that termios returns
MAX_LINE = 1 << 24  # characters
# Bytes that are not UTF-8 are kept, so that the message that refuses them can show them.
ERRORS = "surrogateescape"
TWICE = "Ctrl-C again or Ctrl-D ends the conversation; /help lists what can be typed"


def typed() -> str:
    """Return the part that has been typed of the line that is being read; "" if not known."""
    module = sys.modules.get("readline")
    return module.get_line_buffer() if module is not None else ""


class Screen(Protocol):
    """Where lines come from and where answers go: a terminal or a pipe.

    is_person  a person sees notes on a message and can react; otherwise errors end the program
    """

    is_person: bool

    def read(self, *, is_more: bool) -> str | None:
        """Return the next line; None: no more. At a terminal: LineInterruptedError."""

    def answering(self, stop: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which Ctrl-C stops the answer, by calling `stop`."""

    def waiting(self, words: str) -> AbstractContextManager[Callable[[str], object]]:
        """Return a context that shows `words` until the first token has come.

        It is entered with a function that shows others in their place.
        """

    def write(self, text: str) -> None:
        """Write a part of an answer. Raises OutputError, BrokenPipeError."""

    def end_answer(self, *, is_empty: bool) -> None:
        """End the answer: write a newline if one is missing or the answer is empty."""

    def note(self, line: str) -> None:
        """Show a line that is not part of an answer."""


def _unsaid(_words: str) -> None:
    """Show nothing."""


class _Output:
    """Writes answers to standard output, and knows whether the last line has ended."""

    def __init__(self) -> None:
        self._ends_line = True  # the last character written was a newline

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
    """A screen where a person types the lines."""

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
                # `input` would write the prompt to standard output, among the answers.
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

    @contextmanager
    def waiting(self, words: str) -> Iterator[Callable[[str], object]]:
        if not self._console.is_terminal:
            yield _unsaid
            return
        with self._console.status(words) as status:
            yield status.update

    def write(self, text: str) -> None:
        self._output.write(text)

    def end_answer(self, *, is_empty: bool) -> None:
        self._output.end_answer(is_empty=is_empty)

    def note(self, line: str) -> None:
        # As Text: rich neither colours paths and numbers in it nor breaks the line.
        self._console.print(Text(harmless(line), style="dim"), soft_wrap=True)


@contextmanager
def _typed_ahead() -> Iterator[None]:
    """While inside, an answer is written, and what the user types is kept for the next line.

    Without this, Ctrl-C would throw away what was typed, and a Ctrl-D would be lost that is typed
    before `input` reads with readline. Readline needs Ctrl-D as a character; it is one while the
    terminal gives it no other meaning.
    """
    try:
        before = termios.tcgetattr(sys.stdin)
        changed = termios.tcgetattr(sys.stdin)
        changed[LOCAL_MODES] |= termios.NOFLSH
        if "readline" in sys.modules and sys.stdout.isatty():
            changed[CHARACTERS][termios.VEOF] = b"\0"
        termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
    except (termios.error, ValueError):  # the terminal is gone
        yield
        return
    try:
        yield
    finally:
        with suppress(termios.error, ValueError):
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class Pipe:
    """A screen without a person: every line of standard input is a turn.

    The constructor raises ConfigurationError if standard input is closed.
    """

    is_person = False

    def __init__(self) -> None:
        self._output = _Output()
        if sys.stdin is None:
            raise ConfigurationError("standard input is closed; a conversation reads it")
        sys.stdin.reconfigure(encoding="utf-8", errors=ERRORS)  # type: ignore[union-attr]

    def read(self, *, is_more: bool) -> str | None:  # noqa: ARG002 - there is no prompt
        """Return the next line; None: no more. Raises ConfigurationError: a line is too long."""
        line = sys.stdin.readline(MAX_LINE + 1)
        if len(line) > MAX_LINE:
            raise ConfigurationError(
                f"standard input has a line of more than {MAX_LINE} characters; split it"
            )
        return _stripped(line)

    def answering(self, stop: Callable[[], None]) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()  # Ctrl-C ends the program, as usual

    def waiting(self, words: str) -> AbstractContextManager[Callable[[str], object]]:  # noqa: ARG002
        return nullcontext(_unsaid)

    def write(self, text: str) -> None:
        self._output.write(text)

    def end_answer(self, *, is_empty: bool) -> None:
        self._output.end_answer(is_empty=is_empty)

    def note(self, line: str) -> None:
        sys.stderr.write(harmless(line) + "\n")


def _stripped(line: str) -> str | None:
    """Return a line without its newline; None if nothing was read."""
    return line.removesuffix("\n").removesuffix("\r") if line else None
