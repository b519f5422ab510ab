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

Where the text goes on with bytes that are known (`rest`), only tokens that begin with them fit.
Those that are longer have the noise of the target's token that begins behind these bytes; their
scores are those among all that fit.

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
        self._longer_than = lru_cache(maxsize=NUM_KEPT)(self._found_longer_than)

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
        places: Sequence[tuple[int, bytes, bytes]],
        num_ranked: int,
        *,
        num_valid: int,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return, per row, the `num_ranked` best tokens and their log scores.

        places  for each row: the position in the target's text of the token that `begun` would be
                or begin; `begun`, its bytes (b"": the next token begins there); and `rest`

        Other arguments and the result: as for `rank_scored` in `coupling.py`. Raises NotFinite.
        """
        rows = to_host(logits, num_valid).copy()
        rows[:, ~self._is_sayable[:num_valid]] = -np.inf
        beta = BETA_SAMPLED
        scores = rows
        if sampling.is_greedy:
            beta = BETA_GREEDY
        else:
            scores = scaled(rows, sampling)
        ids: list[list[int]] = []
        likely: list[list[float]] = []
        for row, (position, begun, rest) in zip(scores, places, strict=True):
            count = num_ranked + bool(rest)  # the token that says just `rest` is there already
            if rest:
                row = self._fitting(row, rest)
            elif sampling.cuts and not sampling.is_greedy:
                row = _cut(row, sampling)
            if not sampling.is_greedy:
                now, after = row_keys(seed, sample_index, (position, position + 1))
                self._add_noise(row, (now, after), begun, rest)
            (found,), (values,) = rank(row[None], count, beta)
            ids.append(found)
            likely.append(values)
        return ids, likely

    def _add_noise(self, row: Floats, keys: tuple[int, int], begun: bytes, rest: bytes) -> None:
        """Add the noise to the scores [V] of what may follow, in place.

        keys  of the noise at the position of `begun`, and at the next one
        """
        if rest:
            own, behind = self._longer_than(rest)
            now = self._noise(keys[0])
            is_valid = own < len(row)
            row[own[is_valid]] += now[behind[is_valid]]
        elif begun:
            self._add_within(row, begun, self._noise(keys[0]), self._noise(keys[1]))
        else:
            row += self._noise(keys[0])[self._first[: len(row)]]

    def _fitting(self, row: Floats, rest: bytes) -> Floats:
        """Return the scores with -inf for the tokens that do not begin with `rest`."""
        kept = np.full_like(row, -np.inf)
        just = self._own.id_of(rest)
        ids = np.append(self._longer_than(rest)[0], [] if just is None else just).astype(np.int64)
        ids = ids[ids < len(row)]
        kept[ids] = row[ids]
        return kept if np.isfinite(kept).any() else row

    def _found_longer_than(self, rest: bytes) -> tuple[Ids, Ids]:
        """Return the tokens of `own` that begin with `rest`, and what has their noise.

        That is the target's token that begins behind `rest`.
        """
        own = [(said, id_) for said, id_ in self._own.beginning_with(rest)]
        behind = [
            (self._target.following(said[len(rest) :]) or (self._num_target + id_,))[0]
            for said, id_ in own
        ]
        return np.array([id_ for _, id_ in own], dtype=np.int64), np.array(behind, dtype=np.int64)

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


def _cut(row: Floats, sampling: Sampling) -> Floats:
    """Return the scores [V] with -inf for each token that top-k, top-p and min-p leave out."""
    kept = np.full_like(row, -np.inf)
    ((ids, values),) = candidates(row[None], sampling)
    kept[ids] = values
    return kept
