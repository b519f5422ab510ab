"""The choice where the logits are: the same tokens and scores as on the host."""

import math

import pytest
import torch

from engine.choice.coupling import choose, rank_scored, row_keys
from engine.choice.coupling_on_gpu import choice_inputs, choice_of, choose_there, rank_there
from engine.choice.sampling import Sampling
from engine.errors import EngineError

SEED, SAMPLE = 1 << 63 | 12345, 3
SETTINGS = [
    Sampling(),
    Sampling(1.0),
    Sampling(0.7),
    Sampling(0.8, top_k=40),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_p=0.9),
    Sampling(1.3, top_p=1e-6),
    Sampling(0.9, min_p=0.05),
    Sampling(0.6, top_k=30, top_p=0.8),
    Sampling(1.1, top_k=50, top_p=0.95, min_p=0.01),
]


def some_logits(num_rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Rows as peaked as those of a language model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * 3


def approx(rows: list[list[float]]) -> list[object]:
    """Lists of scores that are as near as float32 allows."""
    return [pytest.approx(row, abs=1e-4) for row in rows]


@pytest.mark.parametrize("vocab", [7, 4096, 20_000])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_tokens_and_scores_are_those_of_the_host(sampling: Sampling, vocab: int) -> None:
    num_rows = 64 if vocab < 10_000 else 8
    logits = some_logits(num_rows, vocab, seed=vocab)
    positions = range(1000, 1000 + num_rows)
    keys = row_keys(SEED, SAMPLE, positions)
    assert any(key >> 63 for key in keys)
    tokens, scores = choose_there(logits, sampling, keys, beta=1.5)()
    wanted, values = rank_scored(logits, sampling, SEED, SAMPLE, positions, 1, beta=1.5)
    assert tokens == choose(logits, sampling, SEED, SAMPLE, positions)
    assert [[token] for token in tokens] == wanted
    assert [[score] for score in scores] == approx(values)
    if sampling.temperature and not sampling.cuts:
        other_keys = row_keys(SEED + 1, SAMPLE, positions)
        assert choose_there(logits, sampling, other_keys)()[0] != tokens


@pytest.mark.parametrize("num_ranked", [2, 4, 30])
@pytest.mark.parametrize("vocab", [7, 4096])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_ranks_are_those_of_the_host(sampling: Sampling, vocab: int, num_ranked: int) -> None:
    logits, positions = some_logits(32, vocab, seed=vocab), range(1000, 1032)
    keys = row_keys(SEED, SAMPLE, positions)
    tokens, scores = rank_there(logits, sampling, keys, num_ranked, beta=1.5)()
    wanted, values = rank_scored(logits, sampling, SEED, SAMPLE, positions, num_ranked, beta=1.5)
    assert tokens == wanted
    assert scores == approx(values)
    assert all(1 <= len(row) <= min(num_ranked, vocab, sampling.top_k or vocab) for row in tokens)
    assert [row[0] for row in tokens] == choose(logits, sampling, SEED, SAMPLE, positions)


def test_ranks_of_ties_rows_ruled_out_and_a_padded_tail() -> None:
    logits = some_logits(32, 300).round()  # many are equal
    logits[:, 100:200] = -math.inf
    logits[0] = -math.inf
    logits[0, 17] = 0.0
    logits[:, 250:] += 1000
    keys = row_keys(SEED, SAMPLE, range(32))
    tokens, scores = rank_there(logits, Sampling(), keys, 4, beta=2.0, num_valid=250)()
    wanted, values = rank_scored(
        logits, Sampling(), SEED, SAMPLE, range(32), 4, beta=2.0, num_valid=250
    )
    assert scores == approx(values)
    assert (tokens[0], wanted[0]) == ([17], [17])
    for row, (got, there, value) in enumerate(zip(tokens, wanted, values, strict=True)):
        # Of those that equal the last one any may be there.
        num_sure = sum(v > value[-1] for v in value)
        assert got[:num_sure] == there[:num_sure]
        assert logits[row, got].tolist() == logits[row, there].tolist()
        assert len(set(got)) == len(got)
        assert max(got) < 250


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_ties_rows_ruled_out_and_a_padded_tail(sampling: Sampling) -> None:
    logits = some_logits(32, 300).round()  # many are equal
    logits[:, 100:200] = -math.inf
    logits[0] = -math.inf
    logits[0, 17] = 0.0
    logits[:, 250:] += 1000
    positions = range(32)
    keys = row_keys(SEED, SAMPLE, positions)
    tokens, _ = choose_there(logits, sampling, keys, num_valid=250)()
    assert tokens == choose(logits, sampling, SEED, SAMPLE, positions, num_valid=250)
    assert tokens[0] == 17
    assert max(tokens) < 250


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    logits = some_logits(3, 50)
    logits[1, 5] = bad
    with pytest.raises(EngineError, match="not finite"):
        choose_there(logits, Sampling(0.5), (1, 2, 3))()
    with pytest.raises(EngineError, match="not finite"):
        choose_there(torch.full((1, 4), -math.inf), Sampling(), (1,))()
    with pytest.raises(EngineError, match="not finite"):
        rank_there(logits, Sampling(0.5), (1, 2, 3), 2, beta=1.0)()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5), Sampling(0.5, top_k=3)], ids=str)
def test_what_is_found_among_numbers_that_are_none_can_be_looked_up(sampling: Sampling) -> None:
    """The next step of a chain reads it before anybody has seen that it is no choice."""
    logits = torch.full((2, 50), math.nan)
    logits[1] = 0.0
    choice = choice_of(sampling, 1.0, None)
    ids = choice.of(logits, choice_inputs(sampling, (1, 2)))[:, 0]
    assert 0 <= ids.min() <= ids.max() < 50
