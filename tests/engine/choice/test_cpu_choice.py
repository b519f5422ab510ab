"""The choice of our C++ against that of numpy, which it may not change."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.choice import cpu_choice
from engine.choice.coupling import choose, rank_later, row_keys
from engine.choice.sampling import Sampling, process
from engine.errors import NotFinite
from tests.noise import gumbel

pytestmark = pytest.mark.skipif(cpu_choice.cpu_choice() is None, reason="no library of our own")

SETTINGS = [
    *(Sampling(), Sampling(1.0), Sampling(0.3), Sampling(1.7), Sampling(0.8, top_k=1)),
    *(Sampling(0.8, top_k=40), Sampling(1.0, top_p=0.9), Sampling(1.3, top_p=0.9999)),
    *(Sampling(0.6, top_k=30, top_p=0.8), Sampling(1.0, min_p=0.05), Sampling(1.0, min_p=1e-8)),
    *(Sampling(1.0, top_k=5000, top_p=0.95), Sampling(0.9, top_p=0.5, min_p=0.001)),
]


def likely_rows(vocab: int, seed: int) -> torch.Tensor:
    """Return logits [4, vocab] as models make them: some tokens stand out, of one row all are even.

    One has a token that is far above all others, and one ties and tokens that are ruled out.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(4, vocab, generator=generator)
    logits[0, ::97] += 9 * torch.rand(len(logits[0, ::97]), generator=generator)
    logits[1] *= 0.01
    logits[2, vocab // 2] += 60
    logits[3, ::3] = 7.25
    logits[3, 1::3] = -math.inf
    return logits


def near(ours: Sequence[float], numpys: Sequence[float]) -> bool:
    return np.allclose(ours, numpys, atol=2e-4, rtol=1e-5)


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let numpy alone choose from here on."""
    monkeypatch.setattr(cpu_choice, "cpu_choice", lambda: None)


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("vocab", [3, 15, 16, 1000, 4097, 49_152])
def test_a_choice_is_that_of_numpy(
    vocab: int, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [likely_rows(vocab, seed) for seed in range(3 if vocab > 5000 else 12)]
    drawn = [(seed, 0, range(9 * seed, 9 * seed + 4)) for seed in range(len(rows))]
    got = [choose(row, sampling, *of) for row, of in zip(rows, drawn, strict=True)]
    cut = [process(row, sampling) for row in rows]
    without(monkeypatch)
    assert got == [choose(row, sampling, *of) for row, of in zip(rows, drawn, strict=True)]
    assert all(map(torch.equal, cut, [process(row, sampling) for row in rows]))


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("count", [1, 3, 9])
def test_tokens_are_ranked_as_by_numpy(
    count: int, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    for vocab, known in ((3, None), (49_152, None), (500, torch.arange(5, 1505, 3))):
        rows = [likely_rows(vocab, seed) for seed in range(4)]

        def ranked(
            rows: Sequence[torch.Tensor] = rows, known: torch.Tensor | None = known
        ) -> list[tuple[list[list[int]], list[list[float]]]]:
            drawn = sampling, 5, 1, [3, 4, 5, 5], count
            return [rank_later(row, *drawn, num_valid=1400, ids=known)() for row in rows]

        got = ranked()
        with monkeypatch.context() as changed:
            changed.setattr(cpu_choice, "cpu_choice", lambda: None)
            want = ranked()
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
        for (_, ours), (_, numpys) in zip(got, want, strict=True):
            assert [len(row) for row in ours] == [len(row) for row in numpys]
            assert all(score <= 0.0 for row in ours for score in row)
            assert all(map(near, ours, numpys))


def test_no_score_is_above_zero() -> None:
    """Where one token is certain, the sum that is nearly known may be below the exact one."""
    logits = torch.zeros(500, 40)
    logits[:, 7] = 60.0
    _, scores = rank_later(logits, Sampling(0.8), 3, 0, range(500), 1)()
    assert all(-1e-3 < row[0] <= 0.0 for row in scores)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_not_ranked(wrong: float) -> None:
    logits = torch.zeros(2, 40)
    logits[1, 33] = wrong
    for sampling in (Sampling(), Sampling(1.0)):
        with pytest.raises(NotFinite):
            rank_later(logits, sampling, 0, 0, [0, 1], 2)()
        with pytest.raises(NotFinite):
            rank_later(torch.full((1, 9), -math.inf), sampling, 0, 0, [0], 2)()


def test_what_may_win_is_little_and_holds_the_winner() -> None:
    ours, vocab = cpu_choice.cpu_choice(), 20_000
    assert ours is not None
    logits = likely_rows(vocab, 1)[:1].expand(300, -1).contiguous()
    rows, keys = logits.numpy(), row_keys(5, 0, range(300))
    best = ours.best(rows)
    found = ours.may_win(rows, best, 0.8, keys)
    assert found is not None
    ids = np.broadcast_to(np.arange(vocab), rows.shape)
    won = (rows / np.float32(0.8) + gumbel(5, 0, range(300), ids)).argmax(axis=1)
    assert all(token in few for token, few in zip(won.tolist(), found, strict=True))
    assert len(set(won.tolist())) > 10  # not only the likeliest
    assert np.mean([len(few) for few in found]) < 60


@pytest.mark.parametrize("at", [0, 7, 15, 16, 40])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_found_wherever_it_is(wrong: float, at: int) -> None:
    logits = torch.zeros(2, 41)
    logits[1, at] = wrong
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=3)):
        with pytest.raises(NotFinite):
            choose(logits, sampling, 0, 0, [0, 1])
    with pytest.raises(NotFinite):
        choose(torch.full((1, 41), -math.inf), Sampling(), 0, 0, [0])


@pytest.mark.parametrize("size", [1e5, 1e7, 3e30])
@pytest.mark.parametrize("temperature", [2e-5, 1.0])
def test_large_logits_are_chosen_among_as_by_numpy(
    temperature: float, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = size * torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    got = choose(logits, Sampling(temperature), 3, 0, range(4))
    without(monkeypatch)
    assert got == choose(logits, Sampling(temperature), 3, 0, range(4))


def test_columns_behind_the_valid_ones_are_not_looked_at() -> None:
    logits = torch.zeros(3, 50)
    logits[:, 40:] = math.nan
    logits[:, 11] = 5.0

    def chosen(sampling: Sampling) -> Sequence[int]:
        return choose(logits, sampling, 0, 0, range(3), num_valid=40)

    assert chosen(Sampling()) == [11, 11, 11]
    assert chosen(Sampling(1.0, top_k=1)) == [11, 11, 11]
    assert max(chosen(Sampling(1.0))) < 40


def test_no_row_is_no_choice() -> None:
    for sampling in SETTINGS:
        assert choose(torch.zeros(0, 30), sampling, 0, 0, []) == []
