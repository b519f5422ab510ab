"""The mask of a text that may consist of certain tokens alone (vLLM's `allowed_token_ids`)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.choice.grammar import WORD, Words, masked_there
from engine.choice.path import Path
from engine.choice.sampling import Floats, Ids


class Allowed:
    """Bans all tokens but some, at every position of a text.

    ids         the tokens that may come, all below V
    vocab_size  V, the number of logits of a row
    """

    def __init__(self, ids: Ids, vocab_size: int) -> None:
        self._is_allowed: npt.NDArray[np.bool_] = np.zeros(vocab_size, dtype=np.bool_)
        self._is_allowed[ids] = True
        padded = np.zeros(-(-vocab_size // WORD) * WORD, dtype=np.bool_)
        padded[ids] = True
        # The packed mask [W], as those of `GrammarMask.masks`.
        self.words: Words = np.packbits(padded, bitorder="little").view(np.int32)

    def on_host(self, paths: Sequence[Path], rows: Floats) -> None:
        """Set the logits of other tokens in `rows` [n, V] to -inf, in place."""
        del paths  # the same at every position
        rows[:, ~self._is_allowed] = -np.inf

    def there(self, paths: Sequence[Path], rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V] with other tokens at -inf; only a packed mask is sent."""
        del paths
        return masked_there(self.words[None], rows)
