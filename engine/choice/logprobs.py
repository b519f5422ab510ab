"""Log-probabilities that a request asks for: of the model's own distribution, before any setting.

They are computed on the device that has the logits. Logits on a GPU stay there: those of a prompt
of 2,000 tokens take a gigabyte, and ranking them on the host takes seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.choice.coupling_on_gpu import check_tops, most_likely_there
from engine.choice.sampling import LOWEST, Floats, most_likely, to_host
from engine.device import fetch, is_host, send
from engine.room import RANKED_AT_ONCE


@dataclass(frozen=True, slots=True)
class Reported:
    """Log-probabilities of n rows.

    ids     [n * (1 + num_top)]: row by row, the row's token, then its likeliest tokens
    values  [n * (1 + num_top)]: their log-probabilities, at least LOWEST
    ranks   [n]: the rank of each row's token; 1 is the likeliest
    """

    ids: tuple[int, ...]
    values: tuple[float, ...]
    ranks: tuple[int, ...]


def report(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> Reported:
    """Return log softmax(logits) of each row's token and of its `num_top` likeliest, best first.

    logits   [n, V] float32, any device; the model's own, unprocessed
    tokens   [n]: the token of each row; of tokens with equal logits the lowest id ranks first

    Raises:
        NotFinite: the logits are not finite.
    """
    if not is_host(logits):
        return report_there(logits[: len(tokens)], tokens, num_top)
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


def report_there(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> Reported:
    """Return what `report` returns, computed on the device of `logits` [n, V] float32.

    Only the results are copied to the host, no row of logits.

    Raises:
        NotFinite: the logits are not finite.
    """
    assert len(logits) == len(tokens)
    step = max(1, RANKED_AT_ONCE // logits.shape[1])
    with torch.inference_mode():
        own = send(torch.tensor(tokens, dtype=torch.int64), logits.device)
        pairs = zip(torch.split(logits, step), torch.split(own, step), strict=True)
        there = torch.cat([_reported_there(*pair, num_top) for pair in pairs])
    found = fetch(there).numpy()
    check_tops(found[:, -1].tolist())
    width = (found.shape[1] - 2) // 2
    values = np.clip(found[:, width : 2 * width], LOWEST, 0.0).astype(np.float32)
    ids, ranks = found[:, :width].astype(np.int64), found[:, -2].astype(np.int64)
    return Reported(
        tuple(ids.ravel().tolist()), tuple(values.ravel().tolist()), tuple(ranks.tolist())
    )


def _reported_there(rows: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return [n, 2 (1 + num_top) + 2] float64: ids, log-probabilities, rank, largest logit.

    rows    [n, V] float32
    tokens  [n] int64 on the same device
    """
    tokens = tokens[:, None]
    score, top = rows.gather(1, tokens), rows.amax(dim=1, keepdim=True)
    log_sum = (rows - top).exp().sum(dim=1, keepdim=True, dtype=torch.float64).log()
    every_id = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    is_before = (rows > score) | ((rows == score) & (every_id < tokens))
    rank = 1 + is_before.sum(dim=1, keepdim=True)
    scores, ids = score, tokens
    if num_top:
        best, found = most_likely_there(rows, every_id, num_top)
        scores, ids = torch.cat((score, best), dim=1), torch.cat((tokens, found), dim=1)
    values = (scores - top).double() - log_sum
    return torch.cat((ids.double(), values, rank.double(), top.double()), dim=1)


def _logprobs(row: Floats, scores: Floats) -> list[float]:
    """Return the log-probabilities, under logits `row` [V], of tokens with logits `scores`."""
    top = row.max()
    with np.errstate(over="ignore"):  # overflow to -inf becomes LOWEST below
        log_sum = np.log(np.exp(row - top, dtype=np.float32).sum(dtype=np.float64))
        values = (scores - top).astype(np.float64) - log_sum
    # Rounding must not make a probability larger than 1.
    return np.clip(values, LOWEST, 0.0).astype(np.float32).tolist()  # type: ignore[no-any-return]


def _rank(row: Floats, token: int) -> int:
    """Return the rank of a token in `row` [V]: 1 is the largest, ties by ascending id."""
    score = row[token]
    return 1 + int((row > score).sum()) + int((row[:token] == score).sum())
