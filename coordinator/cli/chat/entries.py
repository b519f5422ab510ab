'''Lines that were typed, or came through a pipe, as messages and commands (pure).

a line             a message
""" ... """        a message of several lines
a line ending in \\  the message goes on in the next line
/word ...          a command; with a space before it, a message
'''

from dataclasses import dataclass

FENCE = '"""'
GOES_ON = "\\"
# Each with its argument, if it has one, and what it does.
COMMANDS = {
    "help": ("", "this list"),
    "reset": ("", "forget all but the system message (also /clear)"),
    "system": ("TEXT", 'set the system message, or show it; with "" there is none'),
    "drop": ("", "forget the oldest turn, or as many as a message needs to fit"),
    "quit": ("", "end (also /exit, Ctrl-D, or Ctrl-C twice)"),
}
ALSO = {"clear": "reset", "exit": "quit", "q": "quit", "bye": "quit", "?": "help"}


@dataclass(frozen=True, slots=True)
class Say:
    """A message."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """One of COMMANDS."""

    name: str
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Looks like a command and is none."""

    name: str


Entry = Say | Command | Unknown


class Lines:
    """Collects lines until they are an entry."""

    def __init__(self) -> None:
        self._held: list[str] = []  # of a message that goes on
        self._is_fenced = False  # it began with FENCE

    @property
    def is_open(self) -> bool:
        """Whether the next line belongs to what has come."""
        return self._is_fenced or bool(self._held)

    def push(self, line: str) -> Entry | None:
        """What this line completes; None if nothing is complete, or it is empty."""
        if not self.is_open:
            begun = line.lstrip()
            if begun.startswith(FENCE):
                self._is_fenced, line = True, begun.removeprefix(FENCE)
            elif line.startswith("/"):
                return _command(line)
        if self._is_fenced:
            return self._push_fenced(line)
        self._held.append(line.removesuffix(GOES_ON))
        return None if line.endswith(GOES_ON) else self.finish()

    def _push_fenced(self, line: str) -> Entry | None:
        text = line.rstrip()
        if not text.endswith(FENCE):
            self._held.append(line)
            return None
        self._held.append(text.removesuffix(FENCE))
        return self.finish()

    def finish(self) -> Say | None:
        """No more lines come: what is held is the message."""
        text = "\n".join(self._held).strip()
        self.discard()
        return Say(text) if text else None

    def discard(self) -> None:
        """What is held is no message after all."""
        self._held, self._is_fenced = [], False


def _command(line: str) -> Entry:
    said, _, argument = line[1:].strip().partition(" ")
    name = ALSO.get(said.lower(), said.lower())
    return Command(name, argument.strip()) if name in COMMANDS else Unknown(said)


def help_lines() -> list[str]:
    """What can be typed, in lines of at most 80 columns."""
    forms = [(f"/{name} {argument}".rstrip(), what) for name, (argument, what) in COMMANDS.items()]
    forms += [
        (f"{FENCE} ... {FENCE}", "a message of several lines; or end a line with \\"),
        ("Ctrl-C", "stop the answer; what was written of it stays"),
    ]
    width = max(len(form) for form, _ in forms)
    return [f"{form:{width}}  {what}" for form, what in forms]
