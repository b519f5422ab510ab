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
                f"this message has {len(rendered.ids)} tokens without anything that was said "
                f"before, but the target takes {max_len} with the answer"
            )
        return rendered, len(turns) - len(self._turns)
