"""A conversation: what was said, as messages for a template, and what of it fits (pure).

    ask          a question stands at the end and waits for its answer
    answered     the answer stands behind it, as far as it was written
    withdraw     the question goes, as if it had never been asked
    drop_oldest  the first question and its answer go; the system message stays
    reset        all of them go; the system message stays

Roles alternate whatever happens: many templates refuse anything else. Nothing is dropped unless
somebody has asked for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proto.errors import ConfigurationError

# -- entries ---------------------------------------------------------------------------------------

# Lines that were typed, or came through a pipe, as messages and commands.
#
# a line             a message
# """ ... """        a message of several lines
# a line ending in \\  the message goes on in the next line
# /word ...          a command; with a space before it, a message

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


# -- conversation ----------------------------------------------------------------------------------

Message = dict[str, str]
# Messages as a prompt and its token ids.
Encode = Callable[[Sequence[Message]], tuple[str, tuple[int, ...]]]

ROOM_SHARE = 4  # where turns are dropped, a quarter of the context becomes free for the answer


class TooLongError(ConfigurationError):
    """A conversation that does not fit with even one token of an answer."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """What the target is asked to continue."""

    prompt: str
    ids: tuple[int, ...]


class Conversation:
    """What was said.

    system     the system message; empty: none
    is_script  answers stand in a plain transcript, which has line ends of its own around them
    """

    def __init__(self, system: str = "", *, is_script: bool = False) -> None:
        self.system = system
        self._is_script = is_script
        self._turns: list[Turn] = []  # complete, oldest first
        self._question: str | None = None  # has no answer yet

    @property
    def num_turns(self) -> int:
        """Questions that have an answer."""
        return len(self._turns)

    @property
    def messages(self) -> list[Message]:
        """All that was said, as a template reads it."""
        said = [("system", self.system)] if self.system else []
        for turn in self._turns:
            said += [("user", turn.question), ("assistant", turn.answer)]
        if self._question is not None:
            said.append(("user", self._question))
        return [{"role": role, "content": content} for role, content in said]

    def ask(self, question: str) -> None:
        """A question, after the last one was answered or withdrawn."""
        assert self._question is None, "the last question waits for its answer"
        self._question = question

    def answered(self, answer: str) -> None:
        """The answer to the last question, whole or as far as it was written."""
        assert self._question is not None, "nothing was asked"
        self._turns.append(Turn(self._question, answer.strip() if self._is_script else answer))
        self._question = None

    def withdraw(self) -> str:
        """Take the last question back, and return it."""
        assert self._question is not None, "nothing was asked"
        question, self._question = self._question, None
        return question

    def drop_oldest(self) -> bool:
        """Forget the oldest turn; whether there was one."""
        had_one = bool(self._turns)
        del self._turns[:1]
        return had_one

    def reset(self) -> None:
        """Forget all turns."""
        self._turns.clear()

    def rendered(self, encode: Encode, max_len: int) -> Rendered:
        """The prompt. Raises TooLongError; what `encode` raises.

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
        """The prompt, and how many of the oldest turns had to go so that an answer has room.

        max_tokens  most of the answer; it needs no more room than that

        Raises TooLongError if what remains is too long by itself: then nothing is dropped.
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
