"""How models mark their reasoning, and how it is taken out of an answer (pure).

A reasoning model writes its thoughts first, up to a closing mark, and then its answer. Some write
the opening mark themselves. The chat templates of others end the prompt with it, or with both marks
to ask for no thoughts. `READERS` has a row for each pair of marks.
"""

from dataclasses import dataclass
from typing import Literal

ParserName = Literal[
    "auto", "none", "think", "deepseek_r1", "qwen3", "glm45", "mistral", "seed_oss", "cohere"
]
AUTO: ParserName = "auto"


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts before and behind the thoughts of a model."""

    opening: str
    closing: str


_THINK = Marks("<think>", "</think>")  # of many models; vLLM has a name for each of them
READERS: dict[ParserName, Marks] = {
    **dict.fromkeys(("think", "deepseek_r1", "qwen3", "glm45"), _THINK),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
    "cohere": Marks("<|START_THINKING|>", "<|END_THINKING|>"),
}


def marks_of(choice: ParserName, template: str) -> Marks | None:
    """Return the marks of a model's thoughts; None: its answers have none.

    choice    with "auto" the marks are those whose closing one is in the template
    template  the source of the model's chat template; "" if it has none
    """
    if choice != AUTO:
        return READERS.get(choice)
    return next((marks for marks in READERS.values() if marks.closing in template), None)


@dataclass(frozen=True, slots=True)
class Thoughts:
    """What is known of the thoughts in one answer before it is written.

    is_open  the prompt ends within the thoughts, so that the answer begins there
    """

    marks: Marks
    is_open: bool

    @classmethod
    def after(cls, prompt: str, marks: Marks, continued: str = "") -> "Thoughts":
        """Return what the end of a rendered prompt says about the answer to it.

        continued  the message at the end of the prompt that the answer goes on with
        """
        is_within = continued.rfind(marks.opening) > continued.rfind(marks.closing)
        return cls(marks, is_open=is_within or prompt.rstrip().endswith(marks.opening))


class ThoughtStream:
    """Divides an answer that comes in parts into thoughts and what follows them.

    The marks, and white space beside them, are in neither. What may turn out to be a mark, or to
    stand beside one, is held back. Thoughts that never end leave nothing for the answer.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self._marks = thoughts.marks
        self._held = ""
        self._may_open = True  # nothing but white space has come so far
        self._is_within = thoughts.is_open
        self._may_begin = False  # behind the thoughts, before the first sign of the answer

    def read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Add a part; return (thoughts, answer), as far as both are clear now."""
        self._held += text
        if self._may_open and not self._opened(is_last=is_last):
            return "", ""
        thoughts = self._thoughts(is_last=is_last) if self._is_within else ""
        return thoughts, "" if self._is_within else self._answer()

    def _opened(self, *, is_last: bool) -> bool:
        """Read the opening mark, if there is one; False: it is not clear yet whether there is."""
        opening, begun = self._marks.opening, self._held.lstrip()
        if begun.startswith(opening):
            self._is_within, self._held = True, begun.removeprefix(opening).lstrip()
            self._may_open = not self._held and not is_last
            return not self._may_open
        if opening.startswith(begun) and not is_last:
            return False
        self._may_open = False
        if self._is_within:
            self._held = begun
        return True

    def _thoughts(self, *, is_last: bool) -> str:
        """Return the next thoughts; at their end, leave what follows for the answer."""
        thoughts, closing, behind = self._held.partition(self._marks.closing)
        if closing:
            self._is_within, self._held, self._may_begin = False, behind, True
            return thoughts.rstrip()
        end = len(thoughts) if is_last else len(thoughts.removesuffix(self._unclear(thoughts)))
        told = thoughts[:end].rstrip()
        self._held = "" if is_last else self._held[len(told) :]
        return told

    def _unclear(self, text: str) -> str:
        """Return the longest end of the text with which the closing mark may begin."""
        closing = self._marks.closing
        longest = min(len(closing) - 1, len(text))
        return next((text[-n:] for n in range(longest, 0, -1) if closing.startswith(text[-n:])), "")

    def _answer(self) -> str:
        if self._may_begin:
            self._held = self._held.lstrip()
            self._may_begin = not self._held
        told, self._held = self._held, ""
        return told
