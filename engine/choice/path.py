"""The tokens before a position: what a logits processor may look at."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Path:
    """The tokens before the position at which a token is chosen.

    text        the committed tokens, prompt first; the same list in every call, it only grows
    num_prompt  number of prompt tokens at its beginning
    drafted     the drafted tokens between `text` and the position
    """

    text: Sequence[int]
    num_prompt: int
    drafted: Sequence[int]

    @property
    def num_generated(self) -> int:
        """Return the number of tokens after the prompt, drafted ones included."""
        return len(self.text) - self.num_prompt + len(self.drafted)

    def last_generated(self, count: int) -> tuple[int, ...]:
        """Return the last `count` tokens after the prompt (drafted ones too), or all there are."""
        num_drafted = min(count, len(self.drafted))
        start = max(self.num_prompt, len(self.text) - (count - num_drafted))
        drafted = self.drafted[len(self.drafted) - num_drafted :]
        return (*self.text[start:], *drafted)
