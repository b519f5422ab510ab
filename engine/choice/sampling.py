"""From logits to what is sampled: temperature, min-p, top-k, top-p, in this order.

Theory of operation
-------------------
The order is that of vLLM: logits / T; keep what has at least min_p of the largest probability; of
that the k largest; of what is left, renormalised, the fewest that hold a mass of top_p (always at
least one). Equal logits are ranked by token id, the lowest first: exactly k tokens stay, and the
result is a function of the logits alone.

Work is done on the host in numpy, and on candidates instead of the vocabulary as far as possible:
see `candidates`. `process` is the same distribution as whole rows, for those who want all of it.

What depends on the text besides the logits (penalties, bans) comes before all this: see
`processors.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import NotFinite

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

NOT_FINITE = (
    "the model's logits are not finite: float16 overflows in some models, use bfloat16 "
    "or float32; else the weights are damaged"
)

# Below it a text is greedy, as vLLM has it. As in proto/sampling.py.
GREEDY_BELOW = 1e-5
# Logits up to here can be divided by any temperature.
LARGEST = 1e30

# In place of minus infinity, which neither JSON nor a message has.
LOWEST = -9999.0

_FIRST_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose from logits.

    temperature  below GREEDY_BELOW it is greedy: the most likely token, whatever the other fields
                 say
    top_k        keep the k most likely tokens; 0 keeps all
    top_p        keep the most likely tokens that together hold this probability; 1 keeps all
    min_p        keep the tokens with this share of the largest probability; 0 keeps all

    Raises:
        ValueError: a field is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1 (off), not {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in 0 (off) .. 1, not {self.min_p}")

    @property
    def is_greedy(self) -> bool:
        """Whether the choice needs no randomness."""
        return self.temperature < GREEDY_BELOW

    @property
    def cuts(self) -> bool:
        """Whether some tokens may be left out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@lru_cache(maxsize=8)
def sampling_of(temperature: float, top_k: int, top_p: float, min_p: float) -> Sampling:
    """The same object for the same numbers: every pass asks for it."""
    return Sampling(temperature, top_k, top_p, min_p)


def process(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the scaled logits [n, V] float32, with -inf where a token is cut; on `logits`' device.

    Their softmax is the distribution that is sampled. Greedy keeps one token per row.
    """
    rows = to_host(logits)
    if sampling.is_greedy:
        kept = np.full_like(rows, -np.inf)
        best = rows.argmax(axis=1)[:, None]
        np.put_along_axis(kept, best, np.take_along_axis(rows, best, axis=1), axis=1)
        return torch.from_numpy(kept).to(logits.device)
    scores = scaled(rows, sampling)
    if sampling.cuts:
        kept = np.full_like(scores, -np.inf)
        for row, (ids, values) in enumerate(candidates(scores, sampling)):
            kept[row, ids] = values
        scores = kept
    return torch.from_numpy(scores).to(logits.device)


def to_host(logits: torch.Tensor, num_valid: int | None = None) -> Floats:
    """Return [n, V] float32 logits, or their first `num_valid` columns, without a copy on a CPU.

    Raises:
        NotFinite: a row holds NaN or infinity, or nothing that is finite.
    """
    assert logits.dim() == 2
    assert logits.dtype == torch.float32
    rows: Floats = logits.detach().cpu().numpy()[:, :num_valid]
    # NaN and infinity show in the maximum.
    if not all(math.isfinite(row.max()) for row in rows):
        raise NotFinite(NOT_FINITE)
    return rows


def scaled(rows: Floats, sampling: Sampling) -> Floats:
    """Return logits / temperature, a new array [n, V], rounded once per element.

    A row whose largest logit is too far from zero to be divided is shifted first, which leaves its
    distribution as it is: so the largest score is finite whatever the logits.
    """
    assert not sampling.is_greedy
    with np.errstate(over="ignore"):  # what is that much less likely is never chosen: -inf
        if any(abs(row.max()) > LARGEST for row in rows):
            tops = rows.max(axis=1, keepdims=True)
            rows = rows - (tops - tops.clip(-LARGEST, LARGEST))
        return rows / np.float32(sampling.temperature)


def candidates(scores: Floats, sampling: Sampling) -> Iterator[tuple[Ids, Floats]]:
    """Yield, per row of scaled logits [n, V], the tokens that stay: ids and scores, best first."""
    for row in scores:
        yield _cut(row, sampling)


def most_likely(row: Floats, count: int) -> Ids:
    """Return the ids of the `count` largest of row [V], best first, equal ones by ascending id."""
    size = row.shape[0]
    if count < size:
        bound = np.partition(row, size - count)[size - count]
        above = np.flatnonzero(row > bound)
        level = np.flatnonzero(row == bound)[: count - above.shape[0]]
        ids = np.concatenate((above, level))
        ids.sort()
    else:
        ids = np.arange(size)
    order: Ids = ids[np.argsort(-row[ids], kind="stable")]
    return order


def _cut(row: Floats, sampling: Sampling) -> tuple[Ids, Floats]:
    """Apply min-p, top-k, top-p to one row [V] of scaled logits; tokens at -inf never stay."""
    if sampling.min_p > 0.0:
        stay = np.flatnonzero(row - row.max() >= np.float32(math.log(sampling.min_p)))
        ids, scores = _cut(row[stay], replace(sampling, min_p=0.0))
        return stay[ids], scores
    size = row.shape[0]
    if sampling.top_k == 0 and sampling.top_p < 1.0:
        ids = _nucleus_of_all(row, sampling.top_p)
    else:
        ids = most_likely(row, min(sampling.top_k or size, size))
        if sampling.top_p < 1.0:
            ids = ids[: _nucleus_len(_weights(row[ids], row[ids[0]]), sampling.top_p)]
    scores = row[ids]
    num_finite = int(np.isfinite(scores).sum())  # -inf comes last
    return ids[:num_finite], scores[:num_finite]


def _nucleus_of_all(row: Floats, top_p: float) -> Ids:
    """Return the nucleus of a whole row, ranking no more of its head than is needed."""
    size, count = row.shape[0], _FIRST_CANDIDATES
    top = row.max()
    wanted = top_p * float(_weights(row, top).sum())
    while True:
        ids = most_likely(row, min(count, size))
        mass = _weights(row[ids], top).cumsum()
        if mass[-1] >= wanted or count >= size:
            return ids[: int(np.searchsorted(mass, wanted)) + 1]
        count *= 8


def _nucleus_len(weights: Any, top_p: float) -> int:
    """Return how many of the descending weights are needed for a share of `top_p`."""
    mass = weights.cumsum()
    return int(np.searchsorted(mass, top_p * mass[-1])) + 1


def _weights(scores: Floats, top: Any) -> npt.NDArray[np.float64]:
    """Return exp(scores - top) in float64: sums over a vocabulary then hold 12 digits."""
    weights: npt.NDArray[np.float64] = np.exp((scores - top).astype(np.float64))
    return weights
