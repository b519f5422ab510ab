"""Log-probabilities for people: of the model's own distribution, before any setting."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.sampling import LOWEST, Floats, most_likely, to_host


@dataclass(frozen=True, slots=True)
class Reported:
    """n rows: `ids` and `values` [n * (1 + num_top)], the token itself first; `ranks` [n]."""

    ids: tuple[int, ...]
    values: tuple[float, ...]
    ranks: tuple[int, ...]


def report(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> Reported:
    """Return log softmax(logits) of each row's token and of its `num_top` likeliest, best first.

    logits   [n, V] float32, any device; as the model gave them
    tokens   [n]; its rank counts the tokens that are likelier, and of equal ones those of lower id

    Raises:
        NotFinite: the logits are not finite.
    """
    rows = to_host(logits[: len(tokens)])
    assert len(rows) == len(tokens)
    ids: list[int] = []
    values: list[float] = []
    ranks: list[int] = []
    for row, token in zip(rows, tokens, strict=True):
        best = most_likely(row, min(num_top, len(row))) if num_top else np.zeros(0, dtype=np.int64)
        named = np.concatenate((np.array([token]), best))
        ids += named.tolist()
        values += _logprobs(row, row[named])
        ranks.append(_rank(row, token))
    return Reported(tuple(ids), tuple(values), tuple(ranks))


def _logprobs(row: Floats, scores: Floats) -> list[float]:
    top = row.max()
    with np.errstate(over="ignore"):  # to -inf, for which LOWEST stands
        log_sum = np.log(np.exp(row - top, dtype=np.float32).sum(dtype=np.float64))
        values = (scores - top).astype(np.float64) - log_sum
    # Rounding must not make a probability larger than 1.
    return np.clip(values, LOWEST, 0.0).astype(np.float32).tolist()  # type: ignore[no-any-return]


def _rank(row: Floats, token: int) -> int:
    score = row[token]
    return 1 + int((row > score).sum()) + int((row[:token] == score).sum())
