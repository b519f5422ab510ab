"""Temperature, top-k and top-p against a version that sorts and loops."""

import math

import numpy as np
import pytest
import torch

from engine.choice.sampling import Sampling, most_likely, process
from engine.errors import EngineError


def dumb(row: np.ndarray, sampling: Sampling) -> dict[int, float]:
    """Scaled logits of the tokens that stay, by a full sort in Python."""
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if sampling.temperature == 0.0:
        return {ranked[0]: float(row[ranked[0]])}
    score = {i: float(np.float32(row[i]) / np.float32(sampling.temperature)) for i in ranked}
    ranked.sort(key=lambda i: (-score[i], i))
    if sampling.min_p:
        best = score[ranked[0]]
        ranked = [i for i in ranked if math.exp(score[i] - best) >= sampling.min_p]
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    weights = [math.exp(score[i] - score[ranked[0]]) for i in ranked]
    kept, mass = [], 0.0
    for i, weight in zip(ranked, weights, strict=True):
        if kept and mass >= sampling.top_p * sum(weights):
            break
        kept.append(i)
        mass += weight
    if sampling.top_p == 1.0:
        kept = ranked
    return {i: score[i] for i in kept if score[i] > -math.inf}


SETTINGS = [
    Sampling(),
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.0, top_k=1),
    Sampling(0.8, top_k=20),
    Sampling(1.3, top_p=0.9),
    Sampling(1.0, top_p=0.3),
    Sampling(1.0, top_p=1e-9),
    Sampling(0.6, top_k=50, top_p=0.8),
    Sampling(1.0, top_k=5000),
    Sampling(1.0, min_p=0.05),
    Sampling(0.8, min_p=1.0),
    Sampling(1.2, top_k=10, top_p=0.8, min_p=0.1),
    Sampling(1.0, top_p=0.7, min_p=0.001),
]


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("vocab", [3, 64, 1000])
def test_the_processed_logits_are_those_of_the_dumb_version(
    sampling: Sampling, spread: float, vocab: int
) -> None:
    logits = spread * torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    before = logits.clone()
    got = process(logits, sampling)
    assert torch.equal(logits, before)
    for row, want in zip(got.numpy(), (dumb(r, sampling) for r in logits.numpy()), strict=True):
        assert {int(i): float(row[i]) for i in np.flatnonzero(np.isfinite(row))} == want


def test_equal_logits_are_ranked_by_id() -> None:
    row = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0]])
    inf = -math.inf
    assert process(row, Sampling(1.0, top_k=2)).tolist() == [[inf, 3.0, 3.0, inf, inf, inf]]
    assert process(row, Sampling(1.0, top_k=4)).tolist() == [[1.0, 3.0, 3.0, inf, 3.0, inf]]
    assert process(row, Sampling(1.0, top_p=0.3)).tolist() == [[inf, 3.0, inf, inf, inf, inf]]
    assert process(row, Sampling()).tolist() == [[inf, 3.0, inf, inf, inf, inf]]


def test_a_nucleus_of_many_tokens_is_found() -> None:
    flat = torch.zeros(1, 3000)
    assert torch.isfinite(process(flat, Sampling(1.0, top_p=0.5))).sum() == 1500


def test_a_token_that_is_ruled_out_already_stays_out() -> None:
    row = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    for sampling in (Sampling(0.5), Sampling(0.5, top_k=3), Sampling(0.5, top_p=0.999999)):
        assert torch.isfinite(process(row, sampling))[0].tolist() == [True, False, True, False]


def test_top_p_counts_what_top_k_left() -> None:
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = torch.isfinite(process(row, Sampling(1.0, top_k=2, top_p=0.57)))
    assert kept[0].tolist() == [True, False, False, False]  # 0.4 is 4/7 = 0.571 of what is left


@pytest.mark.parametrize("seed", range(20))
def test_the_head_of_a_row_is_that_of_a_stable_sort(seed: int) -> None:
    draw = np.random.default_rng(seed)
    row = draw.integers(0, 40, 300).astype(np.float32)
    count = int(draw.integers(1, 320))
    want = sorted(range(300), key=lambda i: (-row[i], i))[:count]
    assert most_likely(row, count).tolist() == want


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"temperature": -0.1}, "temperature must be 0 (greedy) or more, not -0.1"),
        ({"temperature": math.nan}, "temperature must be 0 (greedy) or more, not nan"),
        ({"temperature": math.inf}, "temperature must be 0 (greedy) or more, not inf"),
        ({"top_k": -1}, "top_k must be 0 (off) or more, not -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1 (off), not 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1 (off), not 1.1"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        Sampling(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == why


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(damage: float) -> None:
    row = torch.tensor([[0.0, damage, 1.0]])
    with pytest.raises(EngineError, match="not finite"):
        process(row, Sampling(1.0))
