"""The logprobs of a prompt, put together from the pieces that the target's prefill sends (pure)."""

from proto.messages import Logprobs, PromptLogprobs


class PromptScores:
    """Collects the rows of positions 1, 2, ... `num_prompt` - 1; the first token has none."""

    def __init__(self, num_prompt: int) -> None:
        self._num_wanted = num_prompt - 1
        self._pieces: list[Logprobs] = []  # in order and without a gap
        self._num_rows = 0  # of all pieces; <= _num_wanted

    @property
    def is_complete(self) -> bool:
        """Whether every row is there."""
        return self._num_rows == self._num_wanted

    def add(self, message: PromptLogprobs) -> bool:
        """Take what is new and follows what is here; returns whether anything was."""
        num_known = 1 + self._num_rows - message.start
        end = max(0, self._num_wanted + 1 - message.start)
        piece = message.logprobs.part(max(0, num_known), end)
        if num_known < 0 or not piece or (self._pieces and piece.width != self._pieces[0].width):
            return False
        self._pieces.append(piece)
        self._num_rows += len(piece)
        return True

    def all(self) -> Logprobs:
        """The rows that are here."""
        return Logprobs(
            tuple(i for piece in self._pieces for i in piece.ids),
            tuple(value for piece in self._pieces for value in piece.values),
            tuple(rank for piece in self._pieces for rank in piece.ranks),
        )
