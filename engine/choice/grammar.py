"""A logits processor that allows only the tokens which a grammar allows.

Owns the place of one text in its grammar. `vocabulary.py` compiles grammars; whoever made the
request has checked that it can be compiled.

Theory of operation
-------------------
A matcher stands behind some tokens of the answer. For the mask of a row it moves to the tokens
before that row: back to where both are the same, and then along the rest. The rows of a tree are
visited in the order of their paths, so that each edge of the tree is walked once, forwards and
back. Rows with the same path have the same mask.

Where the grammar accepts the answer so far, the model's end-of-text tokens are allowed. Behind an
end-of-text token nothing is forbidden any more: with `ignore_eos` a text may go on there. A draft
that the grammar forbids is never accepted, because the target's choice before it cannot be that
token; what follows such a draft does not matter, and its row stays as it is.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.choice.path import Path
from engine.choice.sampling import Floats
from engine.choice.vocabulary import NO_WAY_BACK, Vocabulary, check
from engine.device import send
from engine.errors import GrammarError

Words = npt.NDArray[np.int32]  # masks [n, W]: bit i of word w is that of token 32 w + i
WORD = 32


class GrammarMask:
    """Processor that bans each token which the grammar does not allow after the answer so far.

    vocabulary  the tokens of the target
    grammar     as llguidance writes it
    end_ids     the model's end-of-text tokens
    vocab_size  V, the number of logits of a row; ids that the tokenizer lacks are banned
    allowed     packed mask [W] of the tokens that may come at all; None: any of them

    The constructor and all calls raise GrammarError if the grammar is too complex.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        grammar: str,
        end_ids: Sequence[int],
        vocab_size: int,
        allowed: Words | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._end_ids = frozenset(end_ids)
        self._vocab_size = vocab_size
        self._allowed = None if allowed is None else allowed.view(np.uint8)
        self._matcher = vocabulary.matcher(grammar)
        self._passed: list[int] = []  # tokens of the answer along which the matcher has moved
        # The first tokens of `_passed` that are committed, so that no path differs in them.
        self._num_settled = 0

    def __call__(self, path: Path, row: Floats) -> None:
        """Set the logits of forbidden tokens to -inf, in place (see `processors.Processor`)."""
        (words,) = self.masks([path])
        np.copyto(row, -np.inf, where=~_unpacked(words, len(row)))

    def on_host(self, paths: Sequence[Path], rows: Floats) -> None:
        """Set the logits of forbidden tokens in `rows` [n, V] to -inf, in place."""
        for row, words in zip(rows, self.masks(paths), strict=True):
            np.copyto(row, -np.inf, where=~_unpacked(words, len(row)))

    def there(self, paths: Sequence[Path], rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V] with forbidden tokens at -inf; only the packed masks are sent."""
        return masked_there(self.masks(paths), rows)

    def masks(self, paths: Sequence[Path]) -> Words:
        """Return the packed masks after these paths, one each; bits from V on mean nothing."""
        found: dict[tuple[int, ...], npt.NDArray[np.uint8]] = {}
        for drafted, path in sorted({tuple(path.drafted): path for path in paths}.items()):
            found[drafted] = self._mask(path)
        return np.stack([found[tuple(path.drafted)] for path in paths]).view(np.int32)

    def _mask(self, path: Path) -> npt.NDArray[np.uint8]:
        """Return the mask of one position, as bytes.

        What is too complex with a matcher that has been in use is tried with a new one: the limits
        count what all matchers of a grammar have worked out together.
        """
        mask = self._mask_of(path)
        if self._allowed is not None:
            mask = mask & self._allowed
        if not _unpacked(mask, self._vocab_size).any():
            raise GrammarError("no token may follow the text so far")
        return mask

    def _mask_of(self, path: Path) -> npt.NDArray[np.uint8]:
        """Return the mask of one position, as bytes, also if it allows no token."""
        try:
            return self._mask_once(path)
        except GrammarError:
            self._begin_anew()
        try:
            return self._mask_once(path)
        except GrammarError as error:
            self._begin_anew()
            raise GrammarError(f"{error}; make it simpler") from error

    def _mask_once(self, path: Path) -> npt.NDArray[np.uint8]:
        num_words = -(-self._vocab_size // WORD)
        if not self._move_to(path):
            return np.full(num_words * WORD // 8, 0xFF, dtype=np.uint8)
        allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        check(self._matcher)
        mask = np.zeros(max(num_words * WORD // 8, len(allowed)), dtype=np.uint8)
        mask[: len(allowed)] = allowed
        end = self._vocabulary.size
        may_end = bool(mask[end // 8] >> (end % 8) & 1)
        mask[end // 8] &= ~np.uint8(1 << (end % 8))
        for token in self._end_ids:
            if token < self._vocab_size:
                bit = np.uint8(1 << (token % 8))
                mask[token // 8] = mask[token // 8] | bit if may_end else mask[token // 8] & ~bit
        return mask[: num_words * WORD // 8]

    def _move_to(self, path: Path) -> bool:
        """Move the matcher behind a path; False: the grammar constrains nothing there."""
        num_committed = len(path.text) - path.num_prompt
        answer = _Answer(path, num_committed)
        same = self._num_settled
        while same < min(len(self._passed), len(answer)) and self._passed[same] == answer[same]:
            same += 1
        if same < len(self._passed):
            if not self._matcher.rollback(len(self._passed) - same):
                raise GrammarError(NO_WAY_BACK)
            del self._passed[same:]
        for index in range(same, len(answer)):
            token = answer[index]
            if token in self._end_ids:
                break
            is_known = token < self._vocabulary.size  # the library's own end is no token of a text
            if not (is_known and self._matcher.try_consume_tokens([token])):
                if is_known:
                    self._check_that_it_forbids(token)
                if index < num_committed:
                    raise GrammarError("the text so far does not fit it")
                break
            self._passed.append(token)
        self._num_settled = min(num_committed, len(self._passed))
        return len(self._passed) == len(answer)

    def _check_that_it_forbids(self, token: int) -> None:
        """Raise GrammarError if a token was not taken for another reason than the grammar.

        At a limit the library takes no token and says why only at the next mask.
        """
        allowed = self._matcher.compute_bitmask()
        check(self._matcher)
        if allowed[token // 8] >> (token % 8) & 1:
            raise GrammarError("it is too complex")

    def _begin_anew(self) -> None:
        self._matcher = self._vocabulary.matcher(self._grammar, anew=True)
        self._passed, self._num_settled = [], 0


class _Answer:
    """The tokens of an answer up to a position, by their index: committed ones, then drafts."""

    def __init__(self, path: Path, num_committed: int) -> None:
        self._path = path
        self._num_committed = num_committed

    def __len__(self) -> int:
        return self._num_committed + len(self._path.drafted)

    def __getitem__(self, index: int) -> int:
        if index < self._num_committed:
            return self._path.text[self._path.num_prompt + index]
        return self._path.drafted[index - self._num_committed]


def masked_there(words: Words, rows: torch.Tensor) -> torch.Tensor:
    """Return logits [n, V] with -inf where the packed masks [n, W] have no bit; nothing is awaited.

    The masks are sent as they are, V / 8 bytes for each row, and unpacked on `rows`' device.
    """
    sent = send(torch.from_numpy(words), rows.device)
    places = torch.arange(WORD, dtype=torch.int32, device=rows.device)
    bits = (sent.unsqueeze(2) >> places) & 1
    is_allowed = bits.view(len(words), -1)[:, : rows.shape[1]].bool()
    return rows.masked_fill(~is_allowed, -torch.inf)


def _unpacked(
    words: npt.NDArray[np.int32] | npt.NDArray[np.uint8], size: int
) -> npt.NDArray[np.bool_]:
    """Return the first `size` bits of one packed mask."""
    bits = np.unpackbits(words.view(np.uint8), count=size, bitorder="little")
    return bits.view(np.bool_)
