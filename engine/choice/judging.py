"""Apply the classical rules (`classical_rules.py`) to logits: sample a draft, judge drafts.

The drafter samples from its own distribution, cut to a few candidates. The target judges the drafts
with its own distribution. Both turn logits into distributions in the same way (`sampling.py`).
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.choice.classical_rules import (
    MAX_CANDIDATES,
    Distribution,
    Purpose,
    Weights,
    truncated,
    uniform,
)
from engine.choice.judging_on_gpu import CERTAIN, MakeTrial, candidates_there, judge_there
from engine.choice.sampling import Floats, Ids, Sampling, kept, scaled, to_host


def life_of(sample_index: int, incarnation: int) -> int:
    """Return a number for one life (opening) of one text, to key its random numbers.

    sample_index  index of the text among several of one prompt, which share a seed
    incarnation   number that grows each time the text is opened
    """
    return (sample_index << 32) + incarnation


def distributions(rows: Floats, sampling: Sampling) -> list[Distribution]:
    """Return the sampling distribution of each row of logits [n, V] float32. Not for greedy."""
    assert not sampling.is_greedy
    if not sampling.cuts:
        ids = np.arange(rows.shape[1], dtype=np.int64)
        return [_softmax(ids, row) for row in scaled(rows, sampling)]
    made = []
    for found, values in kept(rows, sampling):
        order = np.argsort(found)
        made.append(_softmax(found[order], values[order]))
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
    """Judge n drafts; return (number accepted, the accepted tokens and the token after them).

    logits        [n + 1, V] float32, any device: before each draft, and after the last
    make_trial    the rule: `token_trial` or `block_trial`
    drafts        [n]: token ids, a chain
    proposals     [n]: the distributions they were sampled from
    life, number  key of the random numbers: no other judgement of this text has both the same
    is_cut        True: the last row of logits is missing ([n, V]), so if all drafts are accepted
                  no token follows them

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
    """Sample a draft token from logits [1, V]; return (token, log probability, ids, weights).

    ids [m] int64 and weights [m] float32 are the distribution q it was sampled from, at most
    `max_candidates` tokens (`truncated`). The target makes the same `Distribution`, bit by bit, of
    them.

    logits     [1, V] float32, any device
    number     key of the random number: no other draft of this life has the same
    num_valid  only ids below it may be drafted; None: all

    Raises:
        NotFinite: the logits are not finite.
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
    """Return the distribution softmax(scores) [m] of the tokens `ids` [m] (ascending)."""
    weights = np.exp((scores - scores.max()).astype(np.float64))
    return Distribution(ids, weights / weights.sum())
