"""Lines that fit a terminal: text breaks between words, a command behind a `\\`."""

import re

WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")  # of a command; quotes hold spaces together
CONTINUED = " \\"  # so a line of a command ends that goes on in the next
INDENT = "    "  # of the next


def continued(command: str, width: int) -> list[str]:
    """The lines of a command, each at most `width` long, that can be copied as they are.

    A single word that is longer than that stays whole.
    """
    indent = command[: len(command) - len(command.lstrip())]
    first, *words = WORD.findall(command)
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
    """The lines of a text, each at most `width` long; all but the first are indented.

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
