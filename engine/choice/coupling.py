"""The coupled choice: a token is a deterministic function of logits, seed and position.

Theory of operation
-------------------
The token chosen at position i is `argmax(s + g)`: s are the scaled logits (`sampling.py`) and g is
standard Gumbel noise, so the token is an exact sample of softmax(s). The noise is computed from a
hash, not drawn. Drafter and target add the *same* g to their own s, and so choose the same token
nearly as often as if they could communicate (Daliri et al., "Coupling without communication", arXiv
2408.07978). What the target chooses does not depend on what was drafted, or when.

The noise, exactly (a format: changing it changes every seeded text). All integers modulo 2^64:

    mix(z)     z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB;
               z ^= z >> 31                       (the output function of splitmix64)
    G          0x9E3779B97F4A7C15
    stream     mix((mix(seed + G) ^ sample_index) + G)
    row        mix((stream ^ position) + G)
    bits       mix(row + (token_id + 1) * G) >> 12    (output token_id + 1 of splitmix64 at `row`)
    v          (bits + 0.5) / 2^52                    exact in float64
    g          -log(-log1p(-v)) in float64, rounded once to float32

v falls as g grows, so the largest noise has the finest resolution, and it is at most 36.7, never
infinite. (A float32 uniform reaches 1.0 once in 2^25 draws: infinite noise, at one position in 220
with a vocabulary of 152,000.) Another libm may round the last float64 bit differently; that changes
one float32 result in 2^29.

g falls as `bits` grows. With the best score of a few likely tokens in hand, a token whose logit is
at most b can only win with noise of at least best - b, which is a limit on its bits: nearly all of
a large vocabulary is ruled out by comparing integers (`_choose_by_limit`; on most CPUs by our C++,
cpu_choice.cpp). The result is the same.

All tree nodes at one position use the same noise, and so does a later choice at that position. So
computed rows of noise are cached: computing one takes as long as a forward of a small model.

Logits on a GPU are not copied to the host: `coupling_on_gpu.py` makes the same choice there.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.choice.coupling_on_gpu import (
    FACTORS,
    GOLDEN,
    Choice,
    Later,
    choice_inputs,
    choice_of,
    choose_there,
    rank_there,
)
from engine.choice.cpu_choice import CpuChoice, for_rows
from engine.choice.sampling import (
    LOWEST,
    NOT_FINITE,
    Floats,
    Ids,
    Sampling,
    kept,
    scaled,
    to_host,
    unchecked,
)
from engine.device import is_host
from engine.errors import NotFinite

Words = npt.NDArray[np.uint64]

# `beta` of `rank_scored`, fitted on the drafts of a small pair at temperature 0.8 and at 0.
BETA_SAMPLED = 1.5
BETA_GREEDY = 2.0

_MASK = (1 << 64) - 1
_TILE = 8192  # elements hashed at a time: larger temporaries cost page faults
_LARGE = 16384  # vocabularies of this size and more are searched by `_choose_by_limit`
_NUM_LIKELY = 64
_KEPT_NOISE = 1 << 23  # size of the cache of noise rows, in elements: 32 MiB


def choose(
    logits: torch.Tensor,
    sampling: Sampling,
    seed: int,
    sample_index: int,
    positions: Sequence[int],
    *,
    num_valid: int | None = None,
) -> list[int]:
    """Return the token chosen at each row: argmax of scaled logits + noise; greedy: of the logits.

    logits        [n, V] float32, any device
    seed          of the request, 64 bits; not used by greedy
    sample_index  index of the text among several of one request
    positions     [n]: position in the text of the token to choose (not of the row's own token)
    num_valid     only ids below it may be chosen (the vocabulary may be padded); None: all

    Of equal scores the lowest id is chosen.

    Raises:
        NotFinite: the logits are not finite.
    """
    return choose_later(logits, sampling, seed, sample_index, positions, num_valid=num_valid)()


def choose_later(
    logits: torch.Tensor,
    sampling: Sampling,
    seed: int,
    sample_index: int,
    positions: Sequence[int],
    *,
    num_valid: int | None = None,
) -> Later[list[int]]:
    """Begin what `choose` does; return what returns the tokens, and raises NotFinite.

    A GPU chooses behind the pass that makes the logits, and later passes may be launched before the
    tokens are asked for. The host chooses when they are asked for.
    """
    assert len(positions) == logits.shape[0]
    keys = row_keys(seed, sample_index, positions)
    if is_host(logits):
        return lambda: _choose_here(logits, num_valid, sampling, keys)
    chosen = choose_there(logits, sampling, keys, num_valid=num_valid)
    return lambda: chosen()[0]


def _choose_here(
    logits: torch.Tensor, num_valid: int | None, sampling: Sampling, keys: Sequence[int]
) -> list[int]:
    """Return what `choose` returns, for logits [n, V] on the host."""
    rows = unchecked(logits, num_valid)
    if (on_cpu := for_rows(rows)) is not None:
        return _choose_of_few(on_cpu, rows, sampling, keys)
    rows = to_host(logits, num_valid)
    if sampling.is_greedy:
        return rows.argmax(axis=1).tolist()  # type: ignore[no-any-return]
    if sampling.cuts:
        return _choose_kept(rows, sampling, keys)
    return _choose_of_all(scaled(rows, sampling), keys)


def _choose_of_few(
    on_cpu: CpuChoice, rows: Floats, sampling: Sampling, keys: Sequence[int]
) -> list[int]:
    """Return what `choose` returns, with our C++ in place of what looks at all of a row.

    Raises:
        NotFinite: the logits are not finite.
    """
    best = on_cpu.best(rows)
    likeliest: list[int] = best.tolist()
    if -1 in likeliest:
        raise NotFinite(NOT_FINITE)
    if sampling.is_greedy:
        return likeliest
    if sampling.cuts:
        return _choose_kept(rows, sampling, keys)
    few = on_cpu.may_win(rows, best, sampling.temperature, keys)
    if few is None:
        return _choose_of_all(scaled(rows, sampling), keys)
    if all(len(ids) == 1 for ids in few):
        return [int(ids[0]) for ids in few]
    scores = [
        row[ids] / np.float32(sampling.temperature) for row, ids in zip(rows, few, strict=True)
    ]
    return _best_of_each(few, scores, keys)


def _choose_kept(rows: Floats, sampling: Sampling, keys: Sequence[int]) -> list[int]:
    """Return what `choose` returns, for logits [n, V] of which some are cut."""
    found = list(kept(rows, sampling))
    return _best_of_each([ids for ids, _ in found], [scores for _, scores in found], keys)


def _choose_of_all(scores: Floats, keys: Sequence[int]) -> list[int]:
    """Return the best sum of score and noise of each row of scores [n, V], by numpy."""
    if scores.shape[1] >= _LARGE:
        return [_choose_by_limit(row, key) for row, key in zip(scores, keys, strict=True)]
    return _add_noise(scores, keys).argmax(axis=1).tolist()  # type: ignore[no-any-return]


def _best_of_each(ids: Sequence[Ids], scores: Sequence[Floats], keys: Sequence[int]) -> list[int]:
    """Return of each row the token with the best sum of its score and noise.

    ids, scores  of each row [m]: tokens, and their scaled logits
    """
    if not ids:
        return []
    # All rows at once: numpy takes longer to call than to compute.
    counts = [len(row) for row in ids]
    words = np.repeat(np.array(keys, dtype=np.uint64), counts)
    sums = np.concatenate(scores) + _gumbel(_bits(words, np.concatenate(ids)))
    ends = accumulate(counts)
    return [_best(row, sums[end - len(row) : end]) for row, end in zip(ids, ends, strict=True)]


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
    """Return, per row, the `num_ranked` best tokens of the coupled choice, and their log scores.

    The first token is the one of `choose`; each other is what `choose` would return if the tokens
    before it were banned. There are fewer tokens where the cuts, or logits of -inf, leave fewer.

    A token's score estimates how likely a better model (the target) is to choose it: log
    softmax(beta (s + g)), natural logarithm, over the tokens that the cuts keep; greedy: log
    softmax(beta logits). A drafter ranks tree nodes by it. It is at least LOWEST, so always finite.

    Arguments as for `choose`; beta None: BETA_GREEDY or BETA_SAMPLED.

    Raises:
        NotFinite: the logits are not finite.
    """
    drawn = seed, sample_index, positions, num_ranked
    return rank_later(logits, sampling, *drawn, num_valid=num_valid, beta=beta)()


def rank_later(
    logits: torch.Tensor,
    sampling: Sampling,
    seed: int,
    sample_index: int,
    positions: Sequence[int],
    num_ranked: int,
    *,
    num_valid: int | None = None,
    beta: float | None = None,
    ids: torch.Tensor | None = None,
) -> Later[tuple[list[list[int]], list[list[float]]]]:
    """Begin what `rank_scored` does; return what returns its result, as in `choose_later`.

    ids  int64 [D] ascending: the tokens of the logits' columns [n, D], on the host; None: all
    """
    assert len(positions) == logits.shape[0]
    keys, sharpness = row_keys(seed, sample_index, positions), beta or _sharpness(sampling)
    if ids is not None:
        return lambda: _rank_some(logits, ids, sampling, keys, num_ranked, sharpness, num_valid)
    if is_host(logits):
        return lambda: _rank_here(logits, num_valid, sampling, keys, num_ranked, sharpness)
    if num_ranked > 1:
        return rank_there(logits, sampling, keys, num_ranked, beta=sharpness, num_valid=num_valid)
    chosen = choose_there(logits, sampling, keys, beta=sharpness, num_valid=num_valid)
    return lambda: _each_alone(*chosen())


def _each_alone(best: list[int], values: list[float]) -> tuple[list[list[int]], list[list[float]]]:
    return [[token] for token in best], [[value] for value in values]


def _rank_here(
    logits: torch.Tensor,
    num_valid: int | None,
    sampling: Sampling,
    keys: Sequence[int],
    num_ranked: int,
    sharpness: float,
    known: Ids | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Return what `rank_scored` returns, for logits [n, columns] on the host, as columns.

    known  [columns] ascending: the token of each column; None: its index
    """
    rows = unchecked(logits, num_valid)
    if not (sampling.cuts and not sampling.is_greedy) and (on_cpu := for_rows(rows)) is not None:
        temperature = 0.0 if sampling.is_greedy else sampling.temperature
        found = on_cpu.rank(rows, temperature, keys, known, num_ranked, sharpness)
        if found is not None:
            columns, scores = found
            return columns, [[max(score, LOWEST) for score in row] for row in scores]
    rows = to_host(logits, num_valid)
    if sampling.is_greedy:
        return rank(rows.copy() if num_ranked > 1 else rows, num_ranked, sharpness)
    if not sampling.cuts:
        return rank(_add_noise(scaled(rows, sampling), keys, known), num_ranked, sharpness)
    ranked: list[list[int]] = []
    scored: list[list[float]] = []
    for key, (stay, sums) in zip(keys, kept(rows, sampling), strict=True):
        order = np.argsort(stay)
        stay, sums = stay[order], sums[order]
        ids = stay if known is None else known[stay]
        (first,), (values,) = rank((sums + _gumbel(_bits(key, ids)))[None], num_ranked, sharpness)
        ranked.append(stay[first].tolist())
        scored.append(values)
    return ranked, scored


def _rank_some(
    logits: torch.Tensor,
    ids: torch.Tensor,
    sampling: Sampling,
    keys: Sequence[int],
    num_ranked: int,
    sharpness: float,
    num_valid: int | None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Return what `rank_scored` returns, for logits [n, D] of some tokens on the host."""
    known = ids.numpy()
    if num_valid is not None:
        known = known[: np.searchsorted(known, num_valid)]
    found, scores = _rank_here(
        logits, len(known), sampling, keys, num_ranked, sharpness, np.ascontiguousarray(known)
    )
    return [known[columns].tolist() for columns in found], scores


def chain_choice(sampling: Sampling, *, num_valid: int | None = None) -> Choice:
    """Return the choice that `rank_scored` makes of one token per row.

    It is for `Executor.run_chain`, which chooses on the device.
    """
    return choice_of(sampling, _sharpness(sampling), num_valid)


def chain_inputs(
    sampling: Sampling,
    seed: int,
    sample_index: int,
    positions: Sequence[int],
    *,
    num_valid: int | None = None,
) -> torch.Tensor:
    """Return the inputs of a `chain_choice`: int64 [n + NUM_SETTINGS] on the host.

    positions  [n]: positions in the text of the tokens to choose
    """
    return choice_inputs(sampling, row_keys(seed, sample_index, positions), num_valid)


# The usual sampling settings. Each stands for a kind of choice: other temperatures, k and p of the
# same kind use the same recording.
USUAL = (
    Sampling(),
    Sampling(1.0),
    Sampling(1.0, top_p=0.9),
    Sampling(1.0, top_k=20),
    Sampling(1.0, top_k=20, top_p=0.9),
)
# Other settings, which are not recorded. Together with the usual ones they use every kernel that a
# choice can have.
RARE = (Sampling(1.0, min_p=0.1), Sampling(1.0, top_k=1000, top_p=0.9, min_p=0.1))


def usual_choices(num_children: Sequence[int]) -> list[Choice]:
    """Return the choices to record as CUDA graphs at load; others run kernel by kernel.

    num_children  the numbers of tokens that `rank_scored` will be asked for (a drafter); (): return
                  those of `choose` instead (a target)
    """
    return _choices(USUAL, num_children)


def rare_choices(num_children: Sequence[int]) -> list[Choice]:
    """Return the choices to run once at load without recording; argument as `usual_choices`."""
    return _choices(RARE, num_children)


def _choices(samplings: Sequence[Sampling], num_children: Sequence[int]) -> list[Choice]:
    """Return the kinds of choice of these settings; `num_children` as in `usual_choices`."""
    if not num_children:
        return [choice_of(sampling, 1.0, None) for sampling in samplings]
    return [
        choice_of(sampling, _sharpness(sampling), _SOME, count)
        for count in sorted(set(num_children))
        for sampling in samplings
    ]


def usual_chains() -> list[Choice]:
    """Return the choices with which chains of draft steps are recorded as CUDA graphs at load."""
    return [choice_of(sampling, _sharpness(sampling), _SOME) for sampling in USUAL]


def _sharpness(sampling: Sampling) -> float:
    """Return the default `beta` of `rank_scored`."""
    return BETA_GREEDY if sampling.is_greedy else BETA_SAMPLED


_SOME = 1  # any num_valid: a drafter always has one; its value is an input of the recording


def _choose_by_limit(row: Floats, key: int) -> int:
    """Return argmax(row + noise) of one row [V] float32, computing the noise of few tokens only.

    Every token is hashed, but the noise is computed only for the likeliest tokens and for those
    whose hash bits could win (see the theory of operation).
    """
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
    """Return the largest hash bits with which a score of at most `bound` could reach `best`.

    The limit is generous by more than all rounding errors of the scores (float32) and of this
    computation.
    """
    if bound == -np.inf:
        return np.uint64(0)
    noise = best - bound - 1e-5 * (1.0 + abs(best) + abs(bound))
    v = -np.expm1(-np.exp(-max(noise, -10.0)))
    return np.uint64(int(v * 2.0**52 * (1 + 1e-9)) + 2)


class _Noise:
    """Cache of the rows of noise used last, at most `_KEPT_NOISE` elements in all."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[int, int], Floats] = OrderedDict()

    def of(self, key: int, vocab_size: int) -> Floats:
        """Return the noise [V] float32 of the row with this key; the caller must not change it."""
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
        """Compute and return the noise [V] float32 of the row with this key."""
        offsets, row = _offsets(vocab_size), np.empty(vocab_size, dtype=np.float32)
        for start in range(0, vocab_size, _TILE):
            part = slice(start, start + _TILE)
            row[part] = _gumbel(_mix(offsets[part] + np.uint64(key)) >> np.uint64(12))
        return row


_noise = _Noise()


def noise_of(key: int, num_ids: int) -> Floats:
    """Return the noise [num_ids] float32 of the row with this key, not to be changed."""
    return _noise.of(key, num_ids)


def _add_noise(scores: Floats, keys: Sequence[int], known: Ids | None = None) -> Floats:
    """Return scores + noise, [n, columns] float32; `known` as in `_rank_here`."""
    total = np.empty_like(scores)
    for row, key in enumerate(keys):
        # Of some tokens it is not kept: the target's choice needs that of all.
        noise = (
            _gumbel(_bits(key, known)) if known is not None else _noise.of(key, len(scores[row]))
        )
        np.add(scores[row], noise, out=total[row])
    return total


def rank(total: Floats, count: int, beta: float) -> tuple[list[list[int]], list[list[float]]]:
    """Return the `count` largest per row and log softmax(beta total); may overwrite `total`.

    The largest are given as indices, without entries of -inf. If `count` is above 1, entries of
    `total` [n, V] are overwritten.
    """
    with np.errstate(over="ignore"):  # to -inf: a weight of zero
        found = [_rank_row(row, min(count, total.shape[1]), beta) for row in total]
    return [ids for ids, _ in found], [scores for _, scores in found]


def _rank_row(row: Floats, count: int, beta: float) -> tuple[list[int], list[float]]:
    """Return what `_rank` returns, for one row [V]."""
    # Row by row: after a forward the CPU caches are full of weights, and then an operation on a
    # two-dimensional array takes three times as long as on its rows one by one (docs/LOG.md).
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
    """Return the id with the largest score; of equal scores the lowest id."""
    return int(ids[scores == scores.max()].min())


def row_keys(seed: int, sample_index: int, positions: Sequence[int]) -> list[int]:
    """Return the 64-bit key of the noise at each position (`row` of the noise format)."""
    stream = _stream(seed & _MASK, sample_index & _MASK)
    return [_mix_one((stream ^ position) + GOLDEN) for position in positions]


@lru_cache(maxsize=1024)
def _stream(seed: int, sample_index: int) -> int:
    """Return `stream` of the noise format: a hash of seed and sample index, 64 bits."""
    return _mix_one((_mix_one(seed + GOLDEN) ^ sample_index) + GOLDEN)


def _bits(key: int | Words, ids: Ids) -> Words:
    """Return the 52 hash bits of each token of `ids` under the row key `key`, uint64.

    `key` is one for all tokens, or one for each.
    """
    words = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    words += np.uint64(key) if isinstance(key, int) else key
    return _mix(words) >> np.uint64(12)


@lru_cache(maxsize=8)
def _offsets(vocab_size: int) -> Words:
    """Return (token id + 1) * G modulo 2^64 for every token, uint64 [V]."""
    offsets = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    offsets.flags.writeable = False  # all callers share this array
    return offsets


def _mix(words: Words) -> Words:
    """Apply the hash `mix` of the noise format to every uint64 word, in place; return `words`."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(FACTORS[0])
    words ^= words >> np.uint64(27)
    words *= np.uint64(FACTORS[1])
    words ^= words >> np.uint64(31)
    return words


def _mix_one(word: int) -> int:
    """Return the hash `mix` of the noise format, for one 64-bit integer."""
    word &= _MASK
    word = (word ^ word >> 30) * FACTORS[0] & _MASK
    word = (word ^ word >> 27) * FACTORS[1] & _MASK
    return word ^ word >> 31


def _gumbel(bits: Words) -> Floats:
    """Return the Gumbel noise, float32, computed from words of 52 hash bits each."""
    v: Any = (bits + 0.5) * 2.0**-52
    np.negative(v, out=v)
    np.log1p(v, out=v)
    np.negative(v, out=v)
    np.log(v, out=v)
    np.negative(v, out=v)
    noise: Floats = v.astype(np.float32)
    return noise
