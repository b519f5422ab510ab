"""The coupled choice where the logits are: on a GPU, so that a token crosses and no row of logits.

It computes what `coupling.py` computes, operator by operator: the same hash in the same integers
(torch has no unsigned multiplication, but two's complement wraps alike), the noise in float64, one
rounding to float32, equal scores to the lowest id. Everything of a pass crosses at once, in one
small tensor, so that the host waits for the device once.
"""

import math
from collections.abc import Sequence

import torch

from engine.device import send
from engine.errors import EngineError
from engine.sampling import LARGEST, LOWEST, NOT_FINITE, Sampling

# Of the noise's format, which `coupling.py` specifies.
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN = 0x9E3779B97F4A7C15


def choose_there(
    logits: torch.Tensor,
    sampling: Sampling,
    keys: Sequence[int],
    *,
    beta: float = 1.0,
    num_valid: int | None = None,
) -> tuple[list[int], list[float]]:
    """Return each row's token and log softmax(beta * score) of it, as `coupling.rank_scored`.

    logits  [n, V] float32, any device
    keys    [n] 64-bit keys of the rows' noise
    beta    sharpness of the second result alone

    Raises:
        EngineError: the logits are not finite.
    """
    with torch.inference_mode():
        scores, ids, top = _scores(logits, sampling, keys, num_valid)
        best = scores.amax(dim=1, keepdim=True)
        tokens = ids.masked_fill(scores != best, logits.shape[1]).amin(dim=1)
        values = -((scores - best) * beta).exp().sum(dim=1).log()
        there = torch.stack((tokens.double(), values.double(), top.double()))
        chosen, logs, tops = there.tolist()
    _check(tops)
    return [int(token) for token in chosen], logs


def rank_there(
    logits: torch.Tensor,
    sampling: Sampling,
    keys: Sequence[int],
    num_ranked: int,
    *,
    beta: float,
    num_valid: int | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Return what `coupling.rank_scored` returns, but for which of equal scores come last.

    Raises:
        EngineError: the logits are not finite.
    """
    with torch.inference_mode():
        scores, ids, top = _scores(logits, sampling, keys, num_valid)
        best, where = scores.topk(min(num_ranked, scores.shape[1]), dim=1)
        total = ((scores - best[:, :1]) * beta).exp().sum(dim=1, keepdim=True).log()
        values = (best - best[:, :1]) * beta - total
        there = torch.cat(
            (ids.gather(1, where).double(), values.double(), top.double()[:, None]), 1
        )
        rows = there.tolist()
    _check([row[-1] for row in rows])
    num = len(rows[0]) // 2 if rows else 0
    tokens, logs = [], []
    for row in rows:
        # Of equal ones the lowest id comes first, as far as they are here.
        kept = sorted((-row[num + i], row[i]) for i in range(num) if row[num + i] > -math.inf)
        tokens.append([int(token) for _, token in kept])
        logs.append([max(-value, LOWEST) for value, _ in kept])
    return tokens, logs


def _scores(
    logits: torch.Tensor, sampling: Sampling, keys: Sequence[int], num_valid: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scaled logits plus noise [n, m], the ids that they are of [n, m], the top logits."""
    rows = logits[:, :num_valid]
    top = rows.amax(dim=1)
    ids = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    if sampling.is_greedy:
        return rows, ids, top
    scores = rows - (top - top.clamp(-LARGEST, LARGEST))[:, None]  # as `scaled` does
    # A tensor: a device multiplies by the reciprocal of a number, and rounds otherwise.
    scores /= torch.full((), sampling.temperature, device=rows.device)
    if sampling.cuts:
        scores, ids = _cut(scores, sampling)
    return scores + _gumbel(_bits(keys, ids)), ids, top


def _check(tops: Sequence[float]) -> None:
    if not all(map(math.isfinite, tops)):
        raise EngineError(NOT_FINITE)


def _cut(scores: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scores, ids) [n, V], best first, with -inf behind what min-p, top-k, top-p leave."""
    scores, ids = scores.sort(dim=1, descending=True, stable=True)
    first = scores[:, :1]
    if sampling.min_p > 0.0:
        is_out = scores - first < torch.full((), math.log(sampling.min_p), device=scores.device)
        scores = scores.masked_fill(is_out, -math.inf)
    if sampling.top_k > 0:
        scores, ids = scores[:, : sampling.top_k], ids[:, : sampling.top_k]
    if sampling.top_p < 1.0:
        weights = (scores - first).double().exp()
        mass = weights.cumsum(dim=1)
        # A token stays as long as those before it do not hold the share yet.
        is_out = mass[:, :-1] >= sampling.top_p * mass[:, -1:]
        scores = torch.cat((first, scores[:, 1:].masked_fill(is_out, -math.inf)), dim=1)
    return scores, ids


def _bits(keys: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
    """Return the 52 hash bits of `ids` [n, m], each row under its key."""
    words = send(torch.tensor([_signed(key) for key in keys]), ids.device)[:, None]
    mixed = (ids + 1) * _signed(GOLDEN) + words
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return _shifted(mixed ^ _shifted(mixed, 31), 12)


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right and fill with zeros, where torch fills with the sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    """The same 64 bits as a number of two's complement."""
    return word - (1 << 64) if word >> 63 else word


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    v = (bits.double() + 0.5) * 2.0**-52
    return -(-(-v).log1p()).log().float()
