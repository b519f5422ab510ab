"""The coupled choice: a token is a deterministic function of logits, seed and position.

Theory of operation
-------------------
The token chosen at position i is `argmax(s + g)`: s are the processed logits (`sampling.py`), g is
standard Gumbel noise, so the token is an exact sample of softmax(s). The noise is computed, not
drawn: drafter and target add the *same* g to their own s and so agree nearly as often as two who
can talk (Daliri et al., "Coupling without communication", arXiv 2408.07978), and what the target
chooses does not depend on what was drafted, or when.

The noise, exactly (a format: changing it changes every seeded text). All integers modulo 2^64:

    mix(z)     z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB;
               z ^= z >> 31                       (the output function of splitmix64)
    G          0x9E3779B97F4A7C15
    stream     mix((mix(seed + G) ^ sample_index) + G)
    row        mix((stream ^ position) + G)
    bits       mix(row + (token_id + 1) * G) >> 12    (output token_id + 1 of splitmix64 at `row`)
    v          (bits + 0.5) / 2^52                    exact in float64
    g          -log(-log1p(-v)) in float64, rounded once to float32

v falls as g grows, so the largest noise has the finest resolution: it ends at 36.7 and not at
infinity. (A float32 uniform reaches 1.0 once in 2^25 draws: infinite noise, at one position in 220
with a vocabulary of 152,000.) A libm may round the last float64 bit differently; one float32
rounding in 2^29 can show it.

g falls as `bits` grows. With the best score of a few likely tokens in hand, a token whose logit is
at most b can only win with noise of at least best - b, which is a limit on its bits: nearly all of
a large vocabulary is ruled out by comparing integers (`_choose_by_limit`). The result is the same.

The noise of a position is the same for all nodes of a tree there, and the next time that something
is chosen there. So rows of noise are kept: computing one takes as long as a small forward.

Logits on a GPU are not brought here: `coupling_on_gpu.py` computes the same there.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.choice.coupling_on_gpu import (
    FACTORS,
    GOLDEN,
    Choice,
    choice_inputs,
    choice_of,
    choose_there,
    rank_there,
)
from engine.choice.sampling import LOWEST, Floats, Ids, Sampling, candidates, scaled, to_host
from engine.device import is_host

Words = npt.NDArray[np.uint64]

# Sharpness of `rank_scored`, fitted on drafts of a small pair at temperature 0.8 and at 0.
BETA_SAMPLED = 1.5
BETA_GREEDY = 2.0

_MASK = (1 << 64) - 1
_TILE = 8192  # elements hashed at a time: larger temporaries cost page faults
_LARGE = 16384  # vocabularies from here on are searched by limit
_NUM_LIKELY = 64
_KEPT_NOISE = 1 << 23  # elements of rows of noise that are kept: 32 MiB


def choose(
    logits: torch.Tensor,
    sampling: Sampling,
    seed: int,
    sample_index: int,
    positions: Sequence[int],
    *,
    num_valid: int | None = None,
) -> list[int]:
    """Return the token that each row chooses.

    logits        [n, V] float32, any device
    seed          64 bits; greedy needs none
    sample_index  which of several texts of one request
    positions     [n]: absolute position of the token that is chosen (not of the row's own token)
    num_valid     only ids below it may be chosen (a padded vocabulary)

    Equal scores go to the lowest id.

    Raises:
        NotFinite: the logits are not finite.
    """
    assert len(positions) == logits.shape[0]
    if not is_host(logits):
        keys = row_keys(seed, sample_index, positions)
        return choose_there(logits, sampling, keys, num_valid=num_valid)[0]
    rows = to_host(logits, num_valid)
    if sampling.is_greedy:
        return rows.argmax(axis=1).tolist()  # type: ignore[no-any-return]
    keys = row_keys(seed, sample_index, positions)
    scores = scaled(rows, sampling)
    if sampling.cuts:
        kept = candidates(scores, sampling)
        return [
            _best(ids, s + _gumbel(_bits(key, ids)))
            for key, (ids, s) in zip(keys, kept, strict=True)
        ]
    if rows.shape[1] >= _LARGE:
        return [_choose_by_limit(row, key) for row, key in zip(scores, keys, strict=True)]
    return _add_noise(scores, keys).argmax(axis=1).tolist()  # type: ignore[no-any-return]


def rank_scored(
    logits: torch.Tensor,
    sampling: Sampling,
    seed: int,
    sample_index: int,
    positions: Sequence[int],
    num_ranked: int,
    *,
    num_valid: int | None = None,
    beta: float | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Return, per row, the `num_ranked` tokens that come first, best first, and their scores.

    The first is the token of `choose`, the others are what it would have chosen without the ones
    before. There are fewer where the cuts, or logits of -inf, leave fewer.

    The score of a token says how likely a better model is to choose it: log softmax(beta (s + g))
    in natural logarithm, over the tokens that stay after the cuts; greedy: log softmax(beta
    logits). It is a drafter's value of a node, and finite whatever the logits.
    """
    assert len(positions) == logits.shape[0]
    if not is_host(logits):
        sharpness = beta or _sharpness(sampling)
        keys = row_keys(seed, sample_index, positions)
        if num_ranked == 1:
            best, values = choose_there(logits, sampling, keys, beta=sharpness, num_valid=num_valid)
            return [[token] for token in best], [[value] for value in values]
        return rank_there(logits, sampling, keys, num_ranked, beta=sharpness, num_valid=num_valid)
    rows = to_host(logits, num_valid)
    if sampling.is_greedy:
        return _rank(rows.copy() if num_ranked > 1 else rows, num_ranked, beta or BETA_GREEDY)
    sharpness = beta or BETA_SAMPLED
    keys = row_keys(seed, sample_index, positions)
    scores = scaled(rows, sampling)
    if not sampling.cuts:
        return _rank(_add_noise(scores, keys), num_ranked, sharpness)
    ranked: list[list[int]] = []
    scored: list[list[float]] = []
    for key, (ids, kept) in zip(keys, candidates(scores, sampling), strict=True):
        by_id = np.argsort(ids)
        ids, kept = ids[by_id], kept[by_id]
        (first,), (values,) = _rank((kept + _gumbel(_bits(key, ids)))[None], num_ranked, sharpness)
        ranked.append(ids[first].tolist())
        scored.append(values)
    return ranked, scored


def chain_choice(
    sampling: Sampling,
    seed: int,
    sample_index: int,
    positions: Sequence[int],
    *,
    num_valid: int | None = None,
) -> tuple[Choice, torch.Tensor]:
    """What `rank_scored` does for one token a row: a choice, inputs for `Executor.run_chain`.

    positions  [n]: of the tokens that are chosen
    """
    keys = row_keys(seed, sample_index, positions)
    return choice_of(sampling, _sharpness(sampling), num_valid), choice_inputs(
        sampling, keys, num_valid
    )


# What most requests ask for: each is a kind of choice, whatever its numbers.
USUAL = (
    Sampling(),
    Sampling(1.0),
    Sampling(1.0, top_p=0.9),
    Sampling(1.0, top_k=20),
    Sampling(1.0, top_k=20, top_p=0.9),
)
# Of what else may be asked for: every kernel that a choice can have is in one of these.
RARE = (Sampling(1.0, min_p=0.1), Sampling(1.0, top_k=1000, top_p=0.9, min_p=0.1))


def usual_choices(num_children: Sequence[int]) -> list[Choice]:
    """The choices that are recorded at load: those of `rank_scored`, or if () those of `choose`.

    Others are made kernel by kernel (`rare_choices`).
    """
    return _choices(USUAL, num_children)


def rare_choices(num_children: Sequence[int]) -> list[Choice]:
    """The choices that are tried at load, and not recorded."""
    return _choices(RARE, num_children)


def _choices(samplings: Sequence[Sampling], num_children: Sequence[int]) -> list[Choice]:
    if not num_children:
        return [choice_of(sampling, 1.0, None) for sampling in samplings]
    return [
        choice_of(sampling, _sharpness(sampling), _SOME, count)
        for count in sorted(set(num_children))
        for sampling in samplings
    ]


def usual_chains() -> list[Choice]:
    """The choices that chains of steps are recorded with at load."""
    return [choice_of(sampling, _sharpness(sampling), _SOME) for sampling in USUAL]


def _sharpness(sampling: Sampling) -> float:
    return BETA_GREEDY if sampling.is_greedy else BETA_SAMPLED


_SOME = 1  # num_valid: a drafter is always told one, and which is a number on the device


def _choose_by_limit(row: Floats, key: int) -> int:
    """Return argmax(row + noise) of one row [V] of finite or -inf scores, hashing but not more."""
    bound = np.partition(row, -_NUM_LIKELY)[-_NUM_LIKELY]
    likely = np.flatnonzero(row >= bound)
    scores = row[likely] + _gumbel(_bits(key, likely))
    limit = _limit(float(scores.max()), float(bound))
    offsets = _offsets(row.shape[0])
    found = []
    for start in range(0, row.shape[0], _TILE):
        bits = _mix(offsets[start : start + _TILE] + np.uint64(key)) >> np.uint64(12)
        found.append(np.flatnonzero(bits <= limit) + start)
    lucky = np.concatenate(found)
    ids = np.concatenate((likely, lucky))
    return _best(ids, np.concatenate((scores, row[lucky] + _gumbel(_bits(key, lucky)))))


def _limit(best: float, bound: float) -> np.uint64:
    """Return the highest bits with which a logit of at most `bound` might reach `best`.

    Generous by more than all roundings of scores (float32) and of this computation.
    """
    if bound == -np.inf:
        return np.uint64(0)
    noise = best - bound - 1e-5 * (1.0 + abs(best) + abs(bound))
    v = -np.expm1(-np.exp(-max(noise, -10.0)))
    return np.uint64(int(v * 2.0**52 * (1 + 1e-9)) + 2)


class _Noise:
    """Rows of noise, the newest ones that were asked for."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[int, int], Floats] = OrderedDict()

    def of(self, key: int, vocab_size: int) -> Floats:
        """Return the noise [V] of a row, which must not be written."""
        rows, name = self._rows, (key, vocab_size)
        row = rows.get(name)
        if row is None:
            row = rows[name] = self._made(key, vocab_size)
            while len(rows) > 1 and len(rows) * vocab_size > _KEPT_NOISE:
                rows.popitem(last=False)
        else:
            rows.move_to_end(name)
        return row

    @staticmethod
    def _made(key: int, vocab_size: int) -> Floats:
        offsets, row = _offsets(vocab_size), np.empty(vocab_size, dtype=np.float32)
        for start in range(0, vocab_size, _TILE):
            part = slice(start, start + _TILE)
            row[part] = _gumbel(_mix(offsets[part] + np.uint64(key)) >> np.uint64(12))
        return row


_noise = _Noise()


def _add_noise(scores: Floats, keys: Sequence[int]) -> Floats:
    """Return scores + noise, [n, V] float32."""
    total = np.empty_like(scores)
    for row, key in enumerate(keys):
        np.add(scores[row], _noise.of(key, scores.shape[1]), out=total[row])
    return total


def _rank(total: Floats, count: int, beta: float) -> tuple[list[list[int]], list[list[float]]]:
    """Return indices and log softmax(beta total) of the `count` largest of each row [n, V].

    What is ruled out, at -inf, is nobody's next token. `total` is spoilt if several are
    asked for.
    """
    with np.errstate(over="ignore"):  # to -inf: a weight of zero
        found = [_rank_row(row, min(count, total.shape[1]), beta) for row in total]
    return [ids for ids, _ in found], [scores for _, scores in found]


def _rank_row(row: Floats, count: int, beta: float) -> tuple[list[int], list[float]]:
    """Return the same of one row [V]."""
    # What is done after a forward finds the caches full of weights, and then an array of two
    # dimensions takes three times as long as its rows one by one (docs/LOG.md).
    first = int(row.argmax())
    best = float(row[first])
    weights = row - best
    weights *= beta
    log = -math.log(np.exp(weights, out=weights).sum())
    ids, scores = [first], [max(log, LOWEST)]
    for _ in range(1, count):
        row[ids[-1]] = -np.inf
        following = int(row.argmax())
        score = beta * (float(row[following]) - best) + log
        if score == -math.inf:
            break
        ids.append(following)
        scores.append(max(score, LOWEST))
    return ids, scores


def _best(ids: Ids, scores: Floats) -> int:
    """Return the id with the largest score, of equal ones the lowest."""
    return int(ids[scores == scores.max()].min())


def row_keys(seed: int, sample_index: int, positions: Sequence[int]) -> list[int]:
    """Return the 64-bit key of the noise at each position, `row` of the format."""
    stream = _stream(seed & _MASK, sample_index & _MASK)
    return [_mix_one((stream ^ position) + GOLDEN) for position in positions]


@lru_cache(maxsize=1024)
def _stream(seed: int, sample_index: int) -> int:
    return _mix_one((_mix_one(seed + GOLDEN) ^ sample_index) + GOLDEN)


def _bits(key: int, ids: Ids) -> Words:
    """Return the 52 hash bits of `ids` in the row of `key`."""
    words = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN) + np.uint64(key)
    return _mix(words) >> np.uint64(12)


@lru_cache(maxsize=8)
def _offsets(vocab_size: int) -> Words:
    """Return (token id + 1) * G for every token."""
    offsets = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    offsets.flags.writeable = False  # every caller gets this array
    return offsets


def _mix(words: Words) -> Words:
    """Apply mix to every word, in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(FACTORS[0])
    words ^= words >> np.uint64(27)
    words *= np.uint64(FACTORS[1])
    words ^= words >> np.uint64(31)
    return words


def _mix_one(word: int) -> int:
    word &= _MASK
    word = (word ^ word >> 30) * FACTORS[0] & _MASK
    word = (word ^ word >> 27) * FACTORS[1] & _MASK
    return word ^ word >> 31


def _gumbel(bits: Words) -> Floats:
    """Return the noise of 52 hash bits each."""
    v: Any = (bits + 0.5) * 2.0**-52
    np.negative(v, out=v)
    np.log1p(v, out=v)
    np.negative(v, out=v)
    np.log(v, out=v)
    np.negative(v, out=v)
    noise: Floats = v.astype(np.float32)
    return noise
