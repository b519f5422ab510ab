"""A conversation: its messages for a chat template, and how much of it fits (pure).

    ask          add a question, which waits for its answer
    answered     add the answer to it, as far as it was written
    withdraw     remove the question, as if it had never been asked
    drop_oldest  remove the first question and its answer; the system message stays
    reset        remove all of them; the system message stays

User and assistant always alternate, because many templates refuse anything else. Nothing is removed
unless the user has asked for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proto.errors import ConfigurationError

# -- entries ---------------------------------------------------------------------------------------

# Turns lines, typed or from a pipe, into messages and commands.
#
# a line             a message
# """ ... """        a message of several lines
# a line ending in \\  the message goes on in the next line
# /word ...          a command; with a space before it, a message

FENCE = '"""'
GOES_ON = "\\"
# By name: the argument, if there is one, and what the command does.
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
    """User input that is a message (not a command)."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """One of COMMANDS, with its argument."""

    name: str
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A line that looks like a command, with an unknown name."""

    name: str


Entry = Say | Command | Unknown


class Lines:
    """Collects lines until they form an entry: a message or a command."""

    def __init__(self) -> None:
        self._held: list[str] = []  # lines of a message that goes on
        self._is_fenced = False  # the message began with FENCE

    @property
    def is_open(self) -> bool:
        """True if the next line belongs to the message so far."""
        return self._is_fenced or bool(self._held)

    def push(self, line: str) -> Entry | None:
        """Add a line; return the entry that it completes, or None (not complete, or empty)."""
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
        """Return the message so far, since no more lines come; None if it is empty."""
        text = "\n".join(self._held).strip()
        self.discard()
        return Say(text) if text else None

    def discard(self) -> None:
        """Drop the lines of an unfinished message."""
        self._held, self._is_fenced = [], False


def _command(line: str) -> Entry:
    said, _, argument = line[1:].strip().partition(" ")
    name = ALSO.get(said.lower(), said.lower())
    return Command(name, argument.strip()) if name in COMMANDS else Unknown(said)


def help_lines() -> list[str]:
    """Return the list of what can be typed, in lines of at most 80 columns."""
    forms = [(f"/{name} {argument}".rstrip(), what) for name, (argument, what) in COMMANDS.items()]
    forms += [
        (f"{FENCE} ... {FENCE}", "a message of several lines; or end a line with \\"),
        ("Ctrl-C", "stop the answer; what was written of it stays"),
    ]
    width = max(len(form) for form, _ in forms)
    return [f"{form:{width}}  {what}" for form, what in forms]


# -- conversation ----------------------------------------------------------------------------------

Message = dict[str, str]
# Turns messages into a prompt and its token ids.
Encode = Callable[[Sequence[Message]], tuple[str, tuple[int, ...]]]

ROOM_SHARE = 4  # turns are dropped until a quarter of the context is free for the answer


class TooLongError(ConfigurationError):
    """Raised if the conversation leaves no room for even one token of an answer."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompt that the target continues, as text and token ids."""

    prompt: str
    ids: tuple[int, ...]


class Conversation:
    """The messages of a conversation.

    system     the system message; empty: none
    is_script  answers are parts of a plain transcript: spaces around them are removed
    """

    def __init__(self, system: str = "", *, is_script: bool = False) -> None:
        self.system = system
        self._is_script = is_script
        self._turns: list[Turn] = []  # complete, oldest first
        self._question: str | None = None  # the question without an answer

    @property
    def num_turns(self) -> int:
        """Return the number of questions that have an answer."""
        return len(self._turns)

    @property
    def messages(self) -> list[Message]:
        """Return all messages, in the form that a chat template reads."""
        said = [("system", self.system)] if self.system else []
        for turn in self._turns:
            said += [("user", turn.question), ("assistant", turn.answer)]
        if self._question is not None:
            said.append(("user", self._question))
        return [{"role": role, "content": content} for role, content in said]

    def ask(self, question: str) -> None:
        """Add a question; the last one must have been answered or withdrawn."""
        assert self._question is None, "the last question waits for its answer"
        self._question = question

    def answered(self, answer: str) -> None:
        """Add the answer to the last question, whole or as far as it was written."""
        assert self._question is not None, "nothing was asked"
        self._turns.append(Turn(self._question, answer.strip() if self._is_script else answer))
        self._question = None

    def withdraw(self) -> str:
        """Remove the question that has no answer yet and return it; there must be one."""
        assert self._question is not None, "nothing was asked"
        question, self._question = self._question, None
        return question

    def drop_oldest(self) -> bool:
        """Remove the oldest turn; return True if there was one."""
        had_one = bool(self._turns)
        del self._turns[:1]
        return had_one

    def reset(self) -> None:
        """Remove all turns of the conversation."""
        self._turns.clear()

    def rendered(self, encode: Encode, max_len: int) -> Rendered:
        """Return the prompt. Raises TooLongError, and the errors of `encode`.

        max_len  most tokens of prompt and answer
        """
        rendered = Rendered(*encode(self.messages))
        if len(rendered.ids) >= max_len:
            raise TooLongError(
                f"the conversation has {len(rendered.ids)} tokens with this message, but the "
                f"target takes {max_len} with the answer"
            )
        return rendered

    def shortened(self, encode: Encode, max_len: int, max_tokens: int) -> tuple[Rendered, int]:
        """Remove oldest turns until an answer has room; return (prompt, number of removed turns).

        max_len     most tokens of prompt and answer
        max_tokens  most tokens of the answer, which needs no more room than that

        Raises TooLongError if the last message alone is too long; then no turn is removed.
        """
        turns = self._turns.copy()
        room = max(1, min(max_tokens, max_len // ROOM_SHARE))
        rendered = Rendered(*encode(self.messages))
        while len(rendered.ids) + room > max_len and self.drop_oldest():
            rendered = Rendered(*encode(self.messages))
        if len(rendered.ids) >= max_len:
            self._turns = turns
            raise TooLongError(
                f"the message has {len(rendered.ids)} tokens without anything that was said "
                f"before; the target takes {max_len} with the answer"
            )
        return rendered, len(turns) - len(self._turns)
