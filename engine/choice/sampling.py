"""Turn logits into the sampling distribution: temperature, min-p, top-k, top-p, in this order.

Theory of operation
-------------------
The order is that of vLLM. Divide the logits by the temperature; keep the tokens with at least min_p
of the largest probability; of these keep the k likeliest; renormalise, and of these keep the fewest
likeliest tokens that hold a mass of top_p (always at least one). Equal logits are ranked by token
id, the lowest first: exactly k tokens stay, and the result is a function of the logits alone.

Work is done on the host in numpy, as far as possible on the tokens that stay instead of the whole
vocabulary: see `candidates`. `process` returns the same distribution as whole rows. On a CPU our
C++ finds the few tokens of a vocabulary that may stay (`cpu_choice.py`), and numpy is left with
those (`kept`).

Penalties and bans, which depend on the text besides the logits, are applied before all this: see
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

from engine.choice.cpu_choice import CpuChoice, for_rows
from engine.errors import NotFinite

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

NOT_FINITE = (
    "the model's logits are not finite: float16 overflows in some models, use bfloat16 "
    "or float32; else the weights are damaged"
)

# A temperature below this means greedy decoding, as in vLLM. Same value as in proto/sampling.py.
GREEDY_BELOW = 1e-5
# Logits up to this size can be divided by any temperature without overflow.
LARGEST = 1e30

# Log-probability reported in place of minus infinity, which JSON and messages cannot hold.
LOWEST = -9999.0

_FIRST_CANDIDATES = 64  # tokens that are ranked first in the search for the top-p nucleus


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits.

    temperature  divides the logits; below GREEDY_BELOW the choice is greedy: the most likely token,
                 whatever the other fields say
    top_k        keep the k most likely tokens; 0 keeps all
    top_p        keep the most likely tokens that together hold this probability; 1 keeps all
    min_p        keep tokens with at least this share of the largest probability; 0 keeps all

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
        """True if the most likely token is chosen, without randomness."""
        return self.temperature < GREEDY_BELOW

    @property
    def cuts(self) -> bool:
        """True if top-k, top-p or min-p is on, so that some tokens may be left out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@lru_cache(maxsize=8)
def sampling_of(temperature: float, top_k: int, top_p: float, min_p: float) -> Sampling:
    """Return `Sampling` of these numbers; recent ones are cached, because every pass asks."""
    return Sampling(temperature, top_k, top_p, min_p)


def process(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return logits / temperature with -inf for each token that is cut, [n, V] float32.

    The softmax of a row is the distribution that is sampled. Greedy keeps the unscaled logit of one
    token per row.

    logits  [n, V] float32, any device; the result is on the same device

    Raises:
        NotFinite: the logits are not finite.
    """
    rows = to_host(logits)
    if sampling.is_greedy:
        scores = np.full_like(rows, -np.inf)
        best = rows.argmax(axis=1)[:, None]
        np.put_along_axis(scores, best, np.take_along_axis(rows, best, axis=1), axis=1)
        return torch.from_numpy(scores).to(logits.device)
    if not sampling.cuts:
        return torch.from_numpy(scaled(rows, sampling)).to(logits.device)
    scores = np.full_like(rows, -np.inf)
    for row, (ids, values) in enumerate(kept(rows, sampling)):
        scores[row, ids] = values
    return torch.from_numpy(scores).to(logits.device)


def to_host(logits: torch.Tensor, num_valid: int | None = None) -> Floats:
    """Return logits [n, V] float32, or their first `num_valid` columns, as a numpy array.

    Logits on a CPU are not copied: the array shares their memory.

    Raises:
        NotFinite: a row holds NaN or +inf, or only -inf.
    """
    rows = unchecked(logits, num_valid)
    # NaN and infinity show in the maximum.
    if not all(math.isfinite(row.max()) for row in rows):
        raise NotFinite(NOT_FINITE)
    return rows


def unchecked(logits: torch.Tensor, num_valid: int | None = None) -> Floats:
    """Return what `to_host` returns, without a look at the numbers."""
    assert logits.dim() == 2
    assert logits.dtype == torch.float32
    rows: Floats = logits.detach().cpu().numpy()[:, :num_valid]
    return rows


def scaled(rows: Floats, sampling: Sampling) -> Floats:
    """Return logits / temperature, a new array [n, V] float32, rounded once per element.

    A row whose largest logit is further than LARGEST from zero is shifted first, which does not
    change its distribution, so that the largest score is always finite. Not for greedy settings.

    rows  [n, V] float32 logits
    """
    assert not sampling.is_greedy
    with np.errstate(over="ignore"):  # overflow to -inf is right: such a token is never chosen
        if any(abs(row.max()) > LARGEST for row in rows):
            tops = rows.max(axis=1, keepdims=True)
            rows = rows - (tops - tops.clip(-LARGEST, LARGEST))
        return rows / np.float32(sampling.temperature)


def kept(rows: Floats, sampling: Sampling) -> Iterator[tuple[Ids, Floats]]:
    """Yield what `candidates` yields, for logits [n, V] that are finite and not yet scaled."""
    on_cpu = for_rows(rows)
    found = None if on_cpu is None else _few(on_cpu, rows, sampling)
    for at, row in enumerate(rows):
        few = None if found is None else _kept_of_few(row, found[0][at], found[1][at], sampling)
        yield few or _cut(scaled(row[None], sampling)[0], sampling)


def _few(
    on_cpu: CpuChoice, rows: Floats, sampling: Sampling
) -> tuple[list[Ids], list[float]] | None:
    """Return what `CpuChoice.likely` returns."""
    return on_cpu.likely(rows, on_cpu.best(rows), sampling.temperature)


def _kept_of_few(
    row: Floats, ids: Ids, rest: float, sampling: Sampling
) -> tuple[Ids, Floats] | None:
    """Return what `_cut` returns, for a row [V] of logits of which only some tokens are looked at.

    ids   [m] ascending: the likeliest tokens
    rest  the sum of exp(score - largest score) of all others

    None: more tokens may stay than these.
    """
    scores = row[ids] / np.float32(sampling.temperature)
    # The others are out of the question where the least likely of these is left out.
    least, are_all = scores.min(), len(ids) == len(row)
    if sampling.min_p > 0.0:
        are_all = are_all or least - scores.max() < _min_p_span(sampling)
    elif sampling.top_k > 0:
        inside = sampling.top_k < len(ids)
        are_all = are_all or (
            inside and np.partition(scores, -sampling.top_k)[-sampling.top_k] > least
        )
    else:
        columns, values = _cut(scores, sampling, rest)
        return (ids[columns], values) if are_all or values[-1] > least else None
    if not are_all:
        return None
    columns, values = _cut(scores, sampling)
    return ids[columns], values


def candidates(scores: Floats, sampling: Sampling) -> Iterator[tuple[Ids, Floats]]:
    """Yield, per row of scaled logits [n, V], the tokens that min-p, top-k and top-p keep.

    Each item is (ids int64 [m], scores float32 [m]), the best first.
    """
    for row in scores:
        yield _cut(row, sampling)


def most_likely(row: Floats, count: int) -> Ids:
    """Return the ids of the `count` largest of `row` [V], largest first, ties by ascending id."""
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


def _cut(row: Floats, sampling: Sampling, rest: float = 0.0) -> tuple[Ids, Floats]:
    """Return ids and scores of the tokens that min-p, top-k and top-p keep, best first.

    row   [V] float32 scaled logits; tokens at -inf are never kept
    rest  the sum of exp(score - largest score) of tokens that are not in the row
    """
    if sampling.min_p > 0.0:
        stay = np.flatnonzero(row - row.max() >= _min_p_span(sampling))
        ids, scores = _cut(row[stay], replace(sampling, min_p=0.0))
        return stay[ids], scores
    size = row.shape[0]
    if sampling.top_k == 0 and sampling.top_p < 1.0:
        ids = _nucleus_of_all(row, sampling.top_p, rest)
    else:
        ids = most_likely(row, min(sampling.top_k or size, size))
        if sampling.top_p < 1.0:
            ids = ids[: _nucleus_len(_weights(row[ids], row[ids[0]]), sampling.top_p)]
    scores = row[ids]
    num_finite = int(np.isfinite(scores).sum())  # -inf comes last
    return ids[:num_finite], scores[:num_finite]


def _min_p_span(sampling: Sampling) -> np.float32:
    """Return how far below the largest score min-p keeps a token; at most 0."""
    return np.float32(math.log(sampling.min_p))


def _nucleus_of_all(row: Floats, top_p: float, rest: float) -> Ids:
    """Return the ids of the top-p nucleus of `row` [V], best first; ranks no more than it needs.

    Arguments as for `_cut`. Where the nucleus is larger than the row, all ids are returned.
    """
    size, count = row.shape[0], _FIRST_CANDIDATES
    top = row.max()
    wanted = top_p * (float(_weights(row, top).sum()) + rest)
    while True:
        ids = most_likely(row, min(count, size))
        mass = _weights(row[ids], top).cumsum()
        if mass[-1] >= wanted or count >= size:
            return ids[: int(np.searchsorted(mass, wanted)) + 1]
        count *= 8


def _nucleus_len(weights: Any, top_p: float) -> int:
    """Return how many of the descending weights it takes to hold a share `top_p` of their sum."""
    mass = weights.cumsum()
    return int(np.searchsorted(mass, top_p * mass[-1])) + 1


def _weights(scores: Floats, top: Any) -> npt.NDArray[np.float64]:
    """Return exp(scores - top) in float64, so that sums over a vocabulary keep 12 digits."""
    weights: npt.NDArray[np.float64] = np.exp((scores - top).astype(np.float64))
    return weights
