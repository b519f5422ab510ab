"""From logits to a judgement: what the classical rules (`verification.py`) do at each end.

The drafter samples from its own processed distribution, cut to a few candidates; the target judges
what was sampled by its own. Both process logits in the same way (`sampling.py`).
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.choice.judging_on_gpu import CERTAIN, MakeTrial, candidates_there, judge_there
from engine.choice.sampling import Floats, Ids, Sampling, candidates, scaled, to_host
from engine.choice.verification import (
    MAX_CANDIDATES,
    Distribution,
    Purpose,
    Weights,
    truncated,
    uniform,
)


def life_of(sample_index: int, incarnation: int) -> int:
    """Names a life of one of several texts of a prompt, which share their seed."""
    return (sample_index << 32) + incarnation


def distributions(rows: Floats, sampling: Sampling) -> list[Distribution]:
    """The distribution that is sampled at each row of logits [n, V], float32 on the host."""
    assert not sampling.is_greedy
    scores = scaled(rows, sampling)
    if not sampling.cuts:
        ids = np.arange(scores.shape[1], dtype=np.int64)
        return [_softmax(ids, row) for row in scores]
    made = []
    for kept, values in candidates(scores, sampling):
        order = np.argsort(kept)
        made.append(_softmax(kept[order], values[order]))
    return made


def judge(
    logits: torch.Tensor,
    sampling: Sampling,
    make_trial: MakeTrial,
    drafts: Sequence[int],
    proposals: Sequence[Distribution],
    *,
    seed: int,
    life: int,
    number: int,
    is_cut: bool = False,
) -> tuple[int, tuple[int, ...]]:
    """Judge n drafts by logits [n + 1, V]: (how many are accepted, they and what follows).

    life, number  name this judgement: no other one of this text has the same two
    is_cut        the last row is missing, [n, V]: if all drafts are accepted nothing follows them

    Raises:
        NotFinite: the logits are not finite.
    """
    assert logits.shape[0] == len(drafts) + (not is_cut) == len(proposals) + (not is_cut)
    luck = [uniform(seed, Purpose.ACCEPT, life, number, i) for i in range(len(drafts))]
    last_luck = uniform(seed, Purpose.CORRECT, life, number)
    if logits.device.type != "cpu":
        num_accepted, token = judge_there(
            logits, sampling, make_trial, drafts, proposals, luck=luck, last_luck=last_luck
        )
        return num_accepted, (*drafts[:num_accepted], *(() if token is None else (token,)))
    rows = to_host(logits)
    targets = [*distributions(rows, sampling), *([CERTAIN] if is_cut else [])]
    trial = make_trial(targets, drafts, proposals)
    num_accepted = trial.num_accepted(luck)
    if num_accepted == len(rows):
        return num_accepted, tuple(drafts)
    following = trial.following(num_accepted).pick(last_luck)
    return num_accepted, (*drafts[:num_accepted], following)


def sample_draft(
    logits: torch.Tensor,
    sampling: Sampling,
    *,
    seed: int,
    life: int,
    number: int,
    num_valid: int | None = None,
    max_candidates: int = MAX_CANDIDATES,
) -> tuple[int, float, Ids, Weights]:
    """Sample a draft from logits [1, V]: (token, log of its chance, what it was sampled from).

    The last two are `truncated`'s: whoever makes a `Distribution` of them has the same to the bit.

    number  names this draft: no other one of this life has the same
    """
    if logits.device.type == "cpu":
        (whole,) = distributions(to_host(logits, num_valid), sampling)
    else:
        whole = candidates_there(logits, sampling, max_candidates, num_valid)
    ids, weights = truncated(whole, max_candidates)
    proposal = Distribution.of(ids, weights)
    token = proposal.pick(uniform(seed, Purpose.DRAFT, life, number))
    return token, min(0.0, float(np.log(proposal.of_token(token)))), ids, weights


def _softmax(ids: Ids, scores: Floats) -> Distribution:
    weights = np.exp((scores - scores.max()).astype(np.float64))
    return Distribution(ids, weights / weights.sum())
