"""A decoder for tests: every token is a word, and some are bytes of one character."""

from collections.abc import Mapping, Sequence

from coordinator.text.detokenization import Piece


class Words:
    """Tokens are looked up; a token without a word holds text back until the next that has one."""

    def __init__(self, words: Mapping[int, str]) -> None:
        self._words = words
        self._is_held = False
        self._num_told = 0

    @property
    def end(self) -> int:
        """The length of the text."""
        return self._num_told + self._is_held

    def placed(self, tokens: Sequence[int]) -> list[Piece]:
        """The word of each token, behind those before it."""
        placed = []
        for token in tokens:
            (text,) = self.pieces([token])
            placed.append(Piece(text, self._num_told))
            self._num_told += len(text)
        return placed

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The word of each token."""
        self._is_held = bool(tokens) and tokens[-1] not in self._words
        return [self._words.get(token, "") for token in tokens]

    def preview(self, tokens: Sequence[int]) -> str:
        """The words, with nothing kept."""
        return "".join(self._words.get(token, "\ufffd") for token in tokens)

    def single(self, token: int) -> str:
        """The word."""
        return self._words.get(token, "\ufffd")

    def finish(self) -> str:
        """What was held back."""
        return "\ufffd" if self._is_held else ""
