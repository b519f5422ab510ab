"""Lines that fit a terminal: text breaks between words, a command behind a `\\`."""

import re
import shutil
import sys

# Of a command: quotes hold spaces together, and a flag its value.
WORD = r"""(?:"[^"]*"|'[^']*'|[^\s"'])+"""
PART = re.compile(rf"--{WORD} (?!-){WORD}|{WORD}")
WIDTH = 80  # of what fits every terminal
CONTINUED = " \\"  # so a line of a command ends that goes on in the next
INDENT = "    "  # of the next


def continued(command: str, width: int) -> list[str]:
    """Return the lines of a command, each at most `width` long, that can be copied as they are.

    A single word that is longer than that stays whole, and so does what is no command: a quote in
    it has no end.
    """
    indent = command[: len(command) - len(command.lstrip())]
    first, *words = PART.findall(command) or [command]
    if " ".join((first, *words)) != command.strip():
        return [command]
    lines, line = [], indent + first
    for number, word in enumerate(words, start=1):
        room = width - (len(CONTINUED) if number < len(words) else 0)
        if len(line) + 1 + len(word) <= room:
            line += " " + word
        else:
            lines.append(line + CONTINUED)
            line = indent + INDENT + word
    return [*lines, line]


def wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    """Return the lines of a text, each at most `width` long; all but the first are indented.

    A single word that is longer than that stays whole.
    """
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = indent + word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


def fitted(text: str, width: int) -> str:
    """Return the text with every longer line wrapped."""
    lines = (wrapped(line, width) if len(line) > width else [line] for line in text.split("\n"))
    return "\n".join(part for parts in lines for part in parts)


def for_stderr(text: str) -> str:
    """Return the text as it is written to stderr: wrapped on a terminal, unchanged elsewhere."""
    if sys.stderr is None or not sys.stderr.isatty():  # None: it was closed at the start
        return text
    return fitted(text, shutil.get_terminal_size().columns)
