"""The coupled choice: its noise as a format, its distribution, and its shortcut."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

from engine.choice import coupling, cpu_choice
from engine.choice.coupling import choose, rank_later, rank_scored
from engine.choice.sampling import Sampling, process
from engine.errors import EngineError
from engine.forward.forward import over_all
from tests.noise import gumbel

# (seed, sample index, position, token id): noise, from the specification in Python.
KNOWN = {
    (0, 0, 0, 0): 1.9743263721466064,
    (1, 0, 0, 0): -0.7705697417259216,
    (0, 1, 0, 0): -0.5371533036231995,
    (0, 0, 1, 0): -0.6449239253997803,
    (0, 0, 0, 1): 2.971836805343628,
    (18_446_744_073_709_551_615, 7, 131_071, 151_935): 3.2857654094696045,
    (1_234_567_890_123_456_789, 0, 42, 4095): 4.492187976837158,
}
MASK = (1 << 64) - 1
SETTINGS = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(0.8, top_k=40),
    Sampling(1.0, top_p=0.9),
    Sampling(0.6, top_k=30, top_p=0.8),
]


def dumb_noise(seed: int, sample_index: int, position: int, token_id: int) -> float:
    """The noise as the module's docstring specifies it, with Python's integers and math."""

    def mix(z: int) -> int:
        z &= MASK
        z ^= z >> 30
        z = z * 0xBF58476D1CE4E5B9 & MASK
        z ^= z >> 27
        z = z * 0x94D049BB133111EB & MASK
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    stream = mix((mix(seed + golden) ^ sample_index) + golden)
    row = mix((stream ^ position) + golden)
    bits = mix(row + (token_id + 1) * golden) >> 12
    v = (bits + 0.5) / 2**52
    return -math.log(-math.log1p(-v))


def dumb_choice(
    logits: torch.Tensor, sampling: Sampling, seed: int, positions: Sequence[int]
) -> list[int]:
    """argmax(processed logits + noise) over the whole vocabulary."""
    ids = np.broadcast_to(np.arange(logits.shape[1]), tuple(logits.shape))
    total = process(logits, sampling).numpy() + gumbel(seed, 0, positions, ids)
    return [int(i) for i in total.argmax(axis=1)]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return (statistic - mean) / standard deviation: below 5 if the counts fit."""
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5)


def softmax(values: Sequence[float]) -> np.ndarray:
    weights = np.exp(np.array(values) - max(values))
    return np.asarray(weights / weights.sum())


def test_known_values_of_the_noise() -> None:
    """A format: these numbers change only with every seeded text in the world."""
    got = [
        float(gumbel(seed, sample, [position], np.array([[token]]))[0, 0])
        for seed, sample, position, token in KNOWN
    ]
    assert got == [np.float32(value) for value in KNOWN.values()]


def test_the_noise_is_the_specified_one() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        seed = int(draw.integers(0, 2**64, dtype=np.uint64))
        sample, position, token = (int(i) for i in draw.integers(0, 200_000, 3))
        got = gumbel(seed, sample, [position], np.array([[token]]))
        want = dumb_noise(seed, sample, position, token)
        assert got.dtype == np.float32
        assert abs(got[0, 0] - want) <= 1e-6 * max(1.0, abs(want))


def test_the_extremes_of_the_noise_are_finite_and_finest_at_the_top() -> None:
    bits = np.array([0, 1, 2**51, 2**52 - 1], dtype=np.uint64)
    got = coupling._gumbel(bits)
    assert got[0] == pytest.approx(53 * math.log(2), rel=1e-6)
    assert got[1] == pytest.approx(math.log(2**52 / 1.5), rel=1e-6)
    assert got[2] == pytest.approx(-math.log(math.log(2)), rel=1e-6)
    assert got[3] == pytest.approx(-math.log(53 * math.log(2)), rel=1e-6)


@pytest.mark.parametrize("axis", ["seed", "sample_index", "position", "token"])
def test_the_noise_is_gumbel_distributed_along_every_key(axis: str) -> None:
    """Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded by chance once in a thousand."""
    count = 20_000
    if axis == "token":
        values = gumbel(11, 0, [5], np.arange(count)[None])[0]
    elif axis == "position":
        values = gumbel(11, 0, range(count), np.full((count, 1), 7))[:, 0]
    else:
        keys = [(i, 3) if axis == "seed" else (11, i) for i in range(count)]
        values = np.array([gumbel(*key, [5], np.array([[7]]))[0, 0] for key in keys])
    below = np.exp(-np.exp(-np.sort(values.astype(np.float64))))
    steps = np.arange(count + 1) / count
    distance = max((steps[1:] - below).max(), (below - steps[:-1]).max())
    assert distance < 1.95 / count**0.5


def test_noise_at_neighbouring_keys_is_uncorrelated() -> None:
    ids = np.broadcast_to(np.arange(2000), (50, 2000))
    base = gumbel(5, 0, range(50), ids)
    for other in (
        gumbel(6, 0, range(50), ids),
        gumbel(5, 1, range(50), ids),
        gumbel(5, 0, range(1, 51), ids),
        gumbel(5, 0, range(50), ids + 1),
    ):
        assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 0.015  # sigma 0.003


def test_a_flat_distribution_over_a_large_vocabulary_is_sampled_uniformly() -> None:
    vocab, count = 152_000, 400
    flat = torch.zeros(1, vocab)
    chosen = [choose(flat, Sampling(1.0), 99, 0, [i])[0] for i in range(count)]
    counts = np.bincount(np.array(chosen) * 20 // vocab, minlength=20)
    assert chi_square(counts, np.full(20, count / 20)) < 5
    ids = np.arange(vocab)
    assert all(np.isfinite(gumbel(99, 0, [i], ids[None])).all() for i in range(100))


@pytest.mark.parametrize("sampling", SETTINGS)
def test_the_choice_is_a_sample_of_the_processed_distribution(sampling: Sampling) -> None:
    row = [2.0, 1.0, 0.5, 0.0, -0.5, 1.5, -2.0, 0.8]
    count = 20_000
    p = softmax(process(torch.tensor([row]), sampling)[0].tolist())
    logits = torch.tensor([row]).expand(count, -1)
    counts = np.bincount(choose(logits, sampling, 4, 0, range(count)), minlength=8)
    possible = p > 0
    assert counts[~possible].sum() == 0
    assert chi_square(counts[possible], count * p[possible]) < 5


def test_the_distribution_test_finds_a_small_bias() -> None:
    row, count = [2.0, 1.0, 0.5, 0.0, -0.5, 1.5, -2.0, 0.8], 20_000
    biased = torch.tensor([row]).expand(count, -1) * 1.08
    counts = np.bincount(choose(biased, Sampling(1.0), 4, 0, range(count)), minlength=8)
    assert chi_square(counts, count * softmax(row)) > 5


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 4.0])
@pytest.mark.parametrize("vocab", [5, 4096, 40_000])
def test_the_choice_equals_that_with_all_the_noise(
    vocab: int, spread: float, sampling: Sampling
) -> None:
    logits = spread * torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    for start in (0, 1000):
        positions = range(start, start + 3)
        want = dumb_choice(logits, sampling, 7, positions)
        assert choose(logits, sampling, 7, 0, positions) == want
        assert rank_scored(logits, sampling, 7, 0, positions, 1)[0] == [[id_] for id_ in want]


def test_the_limit_lets_nothing_pass_that_could_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """On small vocabularies and with few likely tokens, so that the limit decides often."""
    monkeypatch.setattr(cpu_choice, "cpu_choice", lambda: None)
    monkeypatch.setattr(coupling, "_LARGE", 1)
    monkeypatch.setattr(coupling, "_NUM_LIKELY", 2)
    generator = torch.Generator().manual_seed(1)
    for spread in (0.0, 0.3, 1.0, 3.0):
        logits = spread * torch.randn(1, 60, generator=generator).expand(500, -1)
        want = dumb_choice(logits, Sampling(1.0), 8, range(500))
        assert choose(logits, Sampling(1.0), 8, 0, range(500)) == want


def test_tokens_that_are_ruled_out_are_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((200, 300), -math.inf)
    logits[:, 17] = 0.0
    logits[:, 250] = 1.0
    assert set(choose(logits, Sampling(1.0), 1, 0, range(200))) == {17, 250}
    monkeypatch.setattr(cpu_choice, "cpu_choice", lambda: None)
    for large in (1, 10_000):
        monkeypatch.setattr(coupling, "_LARGE", large)
        assert set(choose(logits, Sampling(1.0), 1, 0, range(200))) == {17, 250}


def test_greedy_takes_the_lowest_of_equal_ids_and_ignores_the_seed() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    for seed in range(5):
        assert choose(logits, Sampling(), seed, 0, [4, 5]) == [1, 0]


@pytest.mark.parametrize("sampling", [Sampling(), *SETTINGS])
def test_a_padded_tail_is_never_chosen(sampling: Sampling) -> None:
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(3))
    logits[:, 60:] += 20.0
    cut = logits[:, :60].contiguous()
    for function in (choose, partial(rank_scored, num_ranked=2)):
        got = function(logits, sampling, 3, 0, range(50), num_valid=60)
        assert got == function(cut, sampling, 3, 0, range(50))


def test_a_choice_does_not_depend_on_the_other_rows() -> None:
    logits = torch.randn(20, 4096, generator=torch.Generator().manual_seed(3))
    for sampling in SETTINGS:
        together = choose(logits, sampling, 3, 2, range(20))
        alone = [choose(logits[i : i + 1], sampling, 3, 2, [i])[0] for i in range(20)]
        assert together == alone


def test_coupling_makes_two_models_agree_more_often_than_chance() -> None:
    generator = torch.Generator().manual_seed(2)
    count = 2000
    p = 1.5 * torch.randn(count, 50, generator=generator)
    q = p + 0.7 * torch.randn(count, 50, generator=generator)
    ours = np.array(choose(p, Sampling(1.0), 1, 0, range(count)))
    coupled = (ours == choose(q, Sampling(1.0), 1, 0, range(count))).mean()
    independent = (ours == choose(q, Sampling(1.0), 2, 0, range(count))).mean()
    overlap = float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean())
    assert coupled > 2.5 * independent
    # Between (1 - D) / (1 + D) and 1 - D, with D the total variation distance (Daliri et al.).
    assert overlap / (2 - overlap) - 0.03 < coupled < overlap + 0.03


@pytest.mark.parametrize("sampling", [Sampling(), *SETTINGS])
@pytest.mark.parametrize("vocab", [30, 20_000])
def test_scores_are_a_log_softmax_of_what_was_compared(sampling: Sampling, vocab: int) -> None:
    logits = 2.0 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(5))
    if sampling.is_greedy:
        total, beta = logits, coupling.BETA_GREEDY
    else:
        ids = np.broadcast_to(np.arange(vocab), (4, vocab))
        total = process(logits, sampling) + torch.from_numpy(gumbel(9, 0, range(4), ids))
        beta = coupling.BETA_SAMPLED
    want = (beta * total.double()).log_softmax(-1)
    ids, scores = rank_scored(logits, sampling, 9, 0, range(4), 3)
    assert [row[0] for row in ids] == choose(logits, sampling, 9, 0, range(4))
    for row in range(4):
        best = want[row].topk(min(3, int(want[row].isfinite().sum())))
        assert ids[row] == best.indices.tolist()
        assert scores[row] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("num_valid", [None, 700])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.8), Sampling(1.3, top_p=0.9), Sampling(1.0, top_k=20, min_p=0.01)],
)
def test_logits_of_some_tokens_are_ranked_like_those_of_all_with_the_others_ruled_out(
    sampling: Sampling, num_valid: int | None
) -> None:
    ids = torch.arange(3, 1000, 7)
    some = torch.randn(4, len(ids), generator=torch.Generator().manual_seed(1)) * 3
    some[1, 5] = some[1, 9] = 12.0  # equal ones
    drawn = sampling, 11, 0, [3, 4, 5, 6]
    for count in (1, 4):
        want = rank_scored(over_all(some, ids, 1000), *drawn, count, num_valid=num_valid)
        tokens, scores = rank_later(some, *drawn, count, num_valid=num_valid, ids=ids)()
        assert tokens == want[0]
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(scores, want[1], strict=True))
        assert max(map(max, tokens)) < (num_valid or 1000)


def test_the_sharpness_of_scores_can_be_set() -> None:
    logits = torch.tensor([[1.0, 0.0]])
    _, ((score,),) = rank_scored(logits, Sampling(), 0, 0, [0], 1, beta=1.0)
    assert score == pytest.approx(-math.log(1 + math.exp(-1.0)))


def test_logits_that_are_no_numbers_are_an_error() -> None:
    logits = torch.tensor([[0.0, math.nan]])
    for sampling in (Sampling(), Sampling(1.0)):
        with pytest.raises(EngineError, match="not finite"):
            choose(logits, sampling, 0, 0, [0])


def test_noise_that_is_kept_is_that_which_is_computed_and_not_too_much_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, sampling = (
        torch.randn(6, 100, generator=torch.Generator().manual_seed(5)),
        Sampling(1.0),
    )
    monkeypatch.setattr(cpu_choice, "cpu_choice", lambda: None)
    monkeypatch.setattr(coupling, "_KEPT_NOISE", 250)
    kept = coupling._Noise()
    monkeypatch.setattr(coupling, "_noise", kept)
    for start in (0, 3, 0, 1):
        positions = range(start, start + 6)
        want = dumb_choice(logits, sampling, 7, positions)
        assert choose(logits, sampling, 7, 0, positions) == want
        ids, _ = rank_scored(logits, sampling, 7, 0, positions, 3)
        assert [row[0] for row in ids] == want
        assert len(kept._rows) == 2
    assert choose(logits[:, :60], sampling, 7, 0, range(6)) == dumb_choice(
        logits[:, :60], sampling, 7, range(6)
    )
