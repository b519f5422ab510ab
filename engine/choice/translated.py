"""The coupled choice of a drafter whose vocabulary is not the target's.

Theory of operation
-------------------
The target chooses the token with the largest sum of log probability and noise, and the noise is a
hash of the token's id and its position (`coupling.py`). A drafter that is to make the same choice
needs the noise of the target's ids. Each of its own tokens stands for one of the target's:

    at the beginning of a target's token   the first of the target's tokens that say the same
    within one (`begun` are its bytes)     the longer token that `begun` becomes, if there is one

In the second case the choice is made in two steps, as the target would make it: whether `begun` is
a whole token, with the noise of that token, or becomes a longer one, each with its own noise, at
the same position; if it is whole, which token begins after it, with the noise of the next position.

A token that stands for none of the target's has noise of its own. So nothing is chosen wrongly: the
target has the last word, and noise that is not shared merely makes a draft as good as one that is
sampled apart.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from engine.choice.coupling import BETA_GREEDY, BETA_SAMPLED, noise_of, rank, row_keys
from engine.choice.sampling import Floats, Ids, Sampling, candidates, scaled, to_host
from engine.words import Words

NUM_KEPT = 512  # begun tokens whose continuations are kept


class TranslatedChoice:
    """Chooses tokens of `own` as a target with the tokens of `target` would.

    eos_ids  tokens of `own` that end a text
    """

    def __init__(self, own: Words, target: Words, eos_ids: Sequence[int]) -> None:
        self._own, self._target = own, target
        self._num_target = len(target)
        # By token of `own`: the id whose noise it has. Those beyond the target's are its own noise.
        self._first: Ids = np.arange(len(own), dtype=np.int64) + self._num_target
        self._is_sayable: npt.NDArray[np.bool_] = np.zeros(len(own), dtype=np.bool_)
        self._is_sayable[[id_ for id_ in eos_ids if id_ < len(own)]] = True
        for id_, said in enumerate(own.bytes_of):
            if not said:
                continue
            self._is_sayable[id_] = True
            same = target.id_of(said)
            first = (same,) if same is not None else target.following(said)[:1]
            if first:
                self._first[id_] = first[0]
        self._longer = lru_cache(maxsize=NUM_KEPT)(self._found_longer)

    def _found_longer(self, begun: bytes) -> tuple[Ids, Ids]:
        """Return tokens of `own` that make `begun` a longer token of `target`, and that token."""
        pairs = [
            (own, longer)
            for said, longer in self._target.beginning_with(begun)
            if (own := self._own.id_of(said[len(begun) :])) is not None
        ]
        found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def rank_scored(
        self,
        logits: torch.Tensor,
        sampling: Sampling,
        seed: int,
        sample_index: int,
        places: Sequence[tuple[int, bytes]],
        num_ranked: int,
        *,
        num_valid: int,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return, per row, the `num_ranked` best tokens and their log scores.

        places  for each row: the position in the target's text of the token that `begun` would be
                or begin, and `begun`, its bytes; b"": the next token begins there

        Other arguments and the result: as for `rank_scored` in `coupling.py`. Raises NotFinite.
        """
        rows = to_host(logits, num_valid).copy()
        rows[:, ~self._is_sayable[:num_valid]] = -np.inf
        if sampling.is_greedy:
            return rank(rows, num_ranked, BETA_GREEDY)
        scores = _cut(scaled(rows, sampling), sampling)
        for row, (position, begun) in zip(scores, places, strict=True):
            now, after = row_keys(seed, sample_index, (position, position + 1))
            if begun:
                self._add_within(row, begun, self._noise(now), self._noise(after))
            else:
                row += self._noise(now)[self._first[: len(row)]]
        return rank(scores, num_ranked, BETA_SAMPLED)

    def _noise(self, key: int) -> Floats:
        return noise_of(key, self._num_target + len(self._own))

    def _add_within(self, row: Floats, begun: bytes, now: Floats, after: Floats) -> None:
        """Add the noise to the scores of what follows `begun`, in place.

        row         [V] scores: logits divided by the temperature
        now, after  noise by id at the position of `begun`, and at the next one
        """
        own, longer = self._longer(begun)
        is_valid = own < len(row)
        own, longer = own[is_valid], longer[is_valid]
        joined = row[own] + now[longer]
        row[own] = -np.inf
        top = row.max()
        if np.isfinite(top) and (whole := self._target.id_of(begun)) is not None:
            mass = top + np.log(np.exp(row - top).sum())  # log of the chance that `begun` is whole
            row += after[self._first[: len(row)]]
            row += mass + now[whole] - row.max()
        row[own] = joined


def _cut(scores: Floats, sampling: Sampling) -> Floats:
    """Return the scores with -inf for each token that top-k, top-p and min-p leave out."""
    if not sampling.cuts:
        return scores
    kept = np.full_like(scores, -np.inf)
    for row, (ids, values) in enumerate(candidates(scores, sampling)):
        kept[row, ids] = values
    return kept
