"""The classical rules where the logits are: what the host decides, by a fraction of the numbers."""

import math

import numpy as np
import pytest
import torch

import engine.choice.judging_on_gpu
from engine.choice.classical_rules import (
    Distribution,
    Purpose,
    block_trial,
    token_trial,
    truncated,
    uniform,
)
from engine.choice.judging import distributions, judge, sample_draft
from engine.choice.judging_on_gpu import MakeTrial, candidates_there, judge_there
from engine.choice.sampling import Sampling
from engine.errors import EngineError
from tests.engine.choice.test_device_choice import SETTINGS

SAMPLED = [sampling for sampling in SETTINGS if not sampling.is_greedy]
SEED, LIFE = 77, 3


def some_rows(num_rows: int, vocab: int, seed: int, *, ties: bool = False) -> torch.Tensor:
    rows = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return rows.round() if ties else rows


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [9, 4096])
@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_a_drafter_has_the_candidates_of_the_host(
    sampling: Sampling, vocab: int, *, ties: bool
) -> None:
    for seed in range(5):
        logits = some_rows(1, vocab, seed, ties=ties)
        (whole,) = distributions(logits[:, : vocab - 2].numpy(), sampling)
        ids, weights = truncated(whole, 64)
        there, values = truncated(candidates_there(logits, sampling, 64, vocab - 2), 64)
        assert there.tolist() == ids.tolist()
        assert values == pytest.approx(weights, rel=1e-5)


@pytest.mark.parametrize("make_trial", [token_trial, block_trial])
@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_judgements_are_those_of_the_host(
    sampling: Sampling, make_trial: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_accepted = 0
    for number in range(40):
        target = some_rows(5, 300, number)
        drafts, proposals = [], []
        for row in target[:4] + 0.7 * some_rows(4, 300, 1000 + number):
            token, _, ids, weights = sample_draft(
                row[None], sampling, seed=SEED, life=LIFE, number=number, max_candidates=20
            )
            drafts.append(token)
            proposals.append(Distribution.of(ids, weights))
        wanted = judge(
            target, sampling, make_trial, drafts, proposals, seed=SEED, life=LIFE, number=number
        )
        luck = [uniform(SEED, Purpose.ACCEPT, LIFE, number, i) for i in range(len(drafts))]
        last = uniform(SEED, Purpose.CORRECT, LIFE, number)
        accepted, token = judge_there(
            target, sampling, make_trial, drafts, proposals, luck=luck, last_luck=last
        )
        assert (accepted, (*drafts[:accepted], token)) == wanted
        num_accepted += accepted
    assert 0 < num_accepted < 160


def test_what_follows_is_distributed_as_the_rest() -> None:
    """One draft that is never right: the rest is all of p but for what q could have said."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -math.inf], [0.0, 0.0, 0.0, 0.0]])
    p = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()
    proposal = Distribution(np.array([1, 2]), np.array([0.2, 0.8]))
    rest = np.maximum(p - np.array([0.0, 0.2, 0.8]), 0.0)
    edges = np.cumsum(rest) / rest.sum()
    for u in (0.0, 0.3, float(edges[0]) - 1e-9, float(edges[0]) + 1e-9, 1.0 - 2**-53):
        found = judge_there(
            logits, Sampling(1.0), token_trial, [2], [proposal], luck=[1.0], last_luck=u
        )
        assert found == (0, int(np.searchsorted(edges, u, side="right")))


def test_logits_that_are_not_finite_are_refused() -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = math.nan
    proposal = Distribution(np.array([1]), np.array([1.0]))
    with pytest.raises(EngineError, match="not finite"):
        judge_there(logits, Sampling(1.0), token_trial, [1], [proposal], luck=[0.5], last_luck=0.5)
    with pytest.raises(EngineError, match="not finite"):
        candidates_there(logits[1:], Sampling(1.0), 4)


@pytest.mark.parametrize("sampling", SAMPLED[:2], ids=str)
def test_no_row_of_logits_crosses(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    monkeypatch.setattr(
        engine.choice.judging_on_gpu, "fetch", lambda rows: fetched.append(rows.numel()) or rows
    )
    logits = some_rows(5, 4096, 1)
    whole = candidates_there(logits[:1], sampling, 16)
    proposals = [whole] * 4
    drafts = [int(whole.ids[0])] * 4
    judge_there(logits, sampling, token_trial, drafts, proposals, luck=[0.0] * 4, last_luck=0.5)
    assert max(fetched) <= 5 * 16 + 5


@pytest.mark.parametrize("make_trial", [token_trial, block_trial])
def test_a_chain_without_its_last_row_is_judged_alike_and_nothing_follows_all_of_it(
    make_trial: MakeTrial,
) -> None:
    kinds = set()
    for number in range(60):
        target = some_rows(4, 12, number)
        drafts, proposals = [], []
        for row in target[:3] + 0.3 * some_rows(3, 12, 1000 + number):
            token, _, ids, weights = sample_draft(
                row[None], Sampling(1.0), seed=SEED, life=LIFE, number=number
            )
            drafts.append(token)
            proposals.append(Distribution.of(ids, weights))
        judged = Sampling(1.0), make_trial, drafts, proposals
        named = {"seed": SEED, "life": LIFE, "number": number}
        num_accepted, tokens = judge(target, *judged, **named)
        kinds.add(num_accepted == 3)
        wanted = num_accepted, tokens[:3] if num_accepted == 3 else tokens
        assert judge(target[:3], *judged, **named, is_cut=True) == wanted
        luck = [uniform(SEED, Purpose.ACCEPT, LIFE, number, i) for i in range(3)]
        last = uniform(SEED, Purpose.CORRECT, LIFE, number)
        there = judge_there(target[:3], *judged, luck=luck, last_luck=last)
        assert there == (num_accepted, None if num_accepted == 3 else tokens[-1])
    assert kinds == {True, False}
