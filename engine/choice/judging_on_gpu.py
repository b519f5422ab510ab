"""The classical rules for logits on a GPU: only some probabilities are copied to the host.

The distributions and the acceptance are those of `judging.py`, in the same precision. A drafter
fetches its candidates; a target fetches the probabilities of the tokens that the drafter could have
chosen, and then the token that follows the accepted ones. The rest is done by `classical_rules.py`,
where one artificial token stands for all other tokens of the target: no draft is among them, so
only the sum of their probabilities counts.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.choice.classical_rules import Distribution, Probabilities, Trial
from engine.choice.coupling_on_gpu import check_tops, most_likely_there, scores_of
from engine.choice.sampling import Sampling
from engine.device import fetch, send

MakeTrial = Callable[[Sequence[Distribution], Sequence[int], Sequence[Distribution]], Trial]


def candidates_there(
    logits: torch.Tensor, sampling: Sampling, limit: int, num_valid: int | None = None
) -> Distribution:
    """Return the sampling distribution of logits [1, V] float32, cut to the `limit` likeliest.

    num_valid  only ids below it are tokens; None: all

    Raises:
        NotFinite: the logits are not finite.
    """
    with torch.inference_mode():
        scores, ids, top = scores_of(logits, sampling, num_valid)
        best, found = most_likely_there(scores, ids, limit)
        tops = top.double().expand(best.shape[1])
        there = torch.stack((found[0].double(), best[0].double(), tops))
    tokens, values, same = fetch(there).numpy()
    check_tops(same[:1].tolist())
    kept = np.isfinite(values)
    weights: Probabilities = np.exp(values[kept] - values[0])
    return Distribution.of(tokens[kept].astype(np.int64), weights)


def judge_there(
    logits: torch.Tensor,
    sampling: Sampling,
    make_trial: MakeTrial,
    drafts: Sequence[int],
    proposals: Sequence[Distribution],
    *,
    luck: Sequence[float],
    last_luck: float,
) -> tuple[int, int | None]:
    """Judge n drafts on the logits' device; return (number accepted, the token after them or None).

    The token is None if all drafts are accepted and the last row of logits is missing.

    logits     [n + 1, V] float32, any device; [n, V]: the last row is missing
    make_trial  the rule: `token_trial` or `block_trial`
    luck       [n]: uniform random numbers, one for each draft's test
    last_luck  uniform random number with which the token after the accepted drafts is sampled

    Raises:
        NotFinite: the logits are not finite.
    """
    with torch.inference_mode():
        probs, top = _probabilities(logits, sampling)
        ids = send(_padded([proposal.ids for proposal in proposals]), logits.device)
        at = probs[: len(drafts)].gather(1, ids)
        there = fetch(torch.cat((at.flatten(), top.double()))).numpy()
        check_tops(there[at.numel() :].tolist())
        found = there[: at.numel()].reshape(at.shape)
        rest = logits.shape[1]  # stands for all tokens that the drafter could not have chosen
        targets = [
            _with_rest(proposal, row[: len(proposal.ids)], rest)
            for proposal, row in zip(proposals, found, strict=True)
        ]
        # After the last draft the token is sampled from p itself, below, without the trial.
        trial = make_trial([*targets, CERTAIN], drafts, proposals)
        num_accepted = trial.num_accepted(luck)
        if num_accepted == len(logits):
            return num_accepted, None
        weights = probs[num_accepted]
        if num_accepted < len(drafts):
            weights = _rest(weights, proposals[num_accepted], trial.weights[num_accepted])
        return num_accepted, int(_picked(weights, last_luck).item())


# Stands in the place of a distribution that is not used.
CERTAIN = Distribution(np.zeros(1, dtype=np.int64), np.ones(1))


def _probabilities(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sampling distributions [n, V] float64, and each row's largest logit [n]."""
    scores, ids, top = scores_of(logits, sampling)
    weights = (scores - scores.amax(dim=1, keepdim=True)).double().exp()
    weights /= weights.sum(dim=1, keepdim=True)
    if sampling.cuts:
        weights = weights.new_zeros(logits.shape).scatter_(1, ids, weights)
    return weights, top


def _with_rest(proposal: Distribution, probs: Probabilities, rest: int) -> Distribution:
    """Return p as a distribution: `probs` at the proposal's ids, the remainder at id `rest`."""
    left = max(0.0, 1.0 - float(probs.sum()))
    return Distribution(np.append(proposal.ids, rest), np.append(probs, left))


def _rest(p: torch.Tensor, proposal: Distribution, weight: float) -> torch.Tensor:
    """Return (weight p - q)+ [V] float64, q being `proposal`; p itself if all of it is zero."""
    ids = send(torch.from_numpy(proposal.ids), p.device)
    taken = send(torch.from_numpy(proposal.probs), p.device)
    left = (p * weight).index_add_(0, ids, -taken).clamp_(min=0.0)
    return torch.where(left.any(), left, p)


def _picked(weights: torch.Tensor, u: float) -> torch.Tensor:
    """Return the token, int64 [], sampled from `weights` [V] with the uniform number `u`.

    Never a token of weight zero.
    """
    sums = weights.cumsum(0)
    index = (sums <= sums[-1] * u).sum()
    ids = torch.arange(len(weights), device=weights.device)
    # u * sum may round up to the sum itself.
    return torch.minimum(index, torch.where(weights > 0, ids, 0).amax())


def _padded(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Return rows of ids as one int64 tensor [n, longest], shorter rows padded with zeros."""
    table = np.zeros((len(rows), max(map(len, rows), default=0)), dtype=np.int64)
    for into, row in zip(table, rows, strict=True):
        into[: len(row)] = row
    return torch.from_numpy(table)
