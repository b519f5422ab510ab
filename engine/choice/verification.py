"""The classical rules: judge drafts by the ratio of two distributions, and correct a rejection.

Theory of operation
-------------------
The drafter samples each token x from a distribution q and sends exactly that q; the target knows
its own p. Both are what is left after temperature and cuts.

    token    accept x with chance min(1, p(x)/q(x)), one draft after the other; at the first
             rejection sample from (p - q)+, renormalised (Leviathan et al., arXiv 2211.17192,
             algorithm 1; Chen et al., 2302.01318, algorithm 2)
    block    judge the whole block: with w_0 = 1, w_i = min(1, w_{i-1} p(x_i)/q(x_i)), the longest
             accepted part is the largest i whose own test succeeds, with chance w_n for the whole
             block of n, and for a shorter one, where S_i is the sum over x of (w_i p - q)+ behind
             x_i,  S_i / (S_i + 1 - w_i);  what follows is sampled from (w_i p - q)+, renormalised
             (Sun et al., 2403.10444, algorithm 2). It accepts no fewer tokens than `token`.

After a block of only accepted drafts one more token is sampled from p itself. All tests are `u < c`
with u in [0, 1), so a chance of zero is never taken. docs/speculative-decoding.md has the proofs.

What the randomness may depend on: draft, acceptance and correction are keyed apart, and each by the
life of the process that draws and by a number that it uses once. Noise that were a function of the
position alone would make a second draft at a position say the same as the first, which has just
been rejected: the text would be biased.

Everything here is float64 on the host, and knows no torch.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]
Probabilities = npt.NDArray[np.float64]

# A drafter offers at most so many tokens to choose from: they must cross the wire.
MAX_CANDIDATES = 64


class Purpose(IntEnum):
    """What a random number is for. Two purposes never share one."""

    DRAFT = 0
    ACCEPT = 1
    CORRECT = 2


@dataclass(frozen=True, slots=True)
class Distribution:
    """Tokens and their probabilities; all others have none.

    ids    [m] int64, ascending, each once
    probs  [m] float64, not negative, not all zero; a sum other than 1 is divided out
    """

    ids: Ids
    probs: Probabilities

    @staticmethod
    def of(
        ids: Sequence[int] | Ids, weights: Sequence[float] | Probabilities | Weights
    ) -> "Distribution":
        """A distribution of tokens in any order and weights of any sum."""
        order = np.argsort(ids)
        probs = np.asarray(weights, dtype=np.float64)[order]
        return Distribution(np.asarray(ids, dtype=np.int64)[order], probs / probs.sum())

    def at(self, ids: Ids) -> Probabilities:
        """Probabilities of `ids` [k], as float64 [k]."""
        where = np.searchsorted(self.ids, ids).clip(max=len(self.ids) - 1)
        return np.where(self.ids[where] == ids, self.probs[where], 0.0)

    def of_token(self, token: int) -> float:
        """Probability of one token."""
        return float(self.at(np.array([token]))[0])

    def pick(self, u: float) -> int:
        """The token at `u` in [0, 1) of the cumulated probabilities; never one that has none."""
        sums = self.probs.cumsum()
        index = int(np.searchsorted(sums, u * sums[-1], side="right"))
        # u * sum may round up to the sum itself.
        return int(self.ids[min(index, int(np.flatnonzero(self.probs)[-1]))])

    def minus(self, other: "Distribution", weight: float = 1.0) -> Probabilities:
        """(weight * self - other)+ at `self.ids`: outside them it is zero."""
        difference: Probabilities = np.maximum(weight * self.probs - other.at(self.ids), 0.0)
        return difference


def uniform(seed: int, purpose: Purpose, life: int, number: int, index: int = 0) -> float:
    """A uniform number in [0, 1) with 53 bits: a keyed hash of all arguments (64 bits each)."""
    data = struct.pack("<4Q", purpose, life, number, index)
    key = (seed & (1 << 64) - 1).to_bytes(8, "little")
    word = int.from_bytes(blake2b(data, digest_size=8, key=key).digest(), "little")
    return (word >> 11) * 2.0**-53


def truncated(distribution: Distribution, limit: int = MAX_CANDIDATES) -> tuple[Ids, Weights]:
    """The `limit` likeliest tokens, ids ascending, and weights [m] float32; ties to the lowest id.

    To sample from `Distribution.of` these, and to send exactly these, makes a short message exact.
    """
    order = np.argsort(-distribution.probs, kind="stable")[:limit]
    probs = distribution.probs[order]
    weights = (probs / probs.sum()).astype(np.float32)
    kept = weights > 0
    ids, weights = distribution.ids[order][kept], weights[kept]
    by_id = np.argsort(ids)
    return ids[by_id], weights[by_id]


@dataclass(frozen=True, slots=True)
class Trial:
    """Everything about judging n drafts but the luck.

    targets    [n + 1]: p before each draft, and after the last
    proposals  [n]: draft i was sampled from proposals[i]
    chances    [n]: with which the test of each draft succeeds
    weights    [n + 1]: of p in the correction, if i drafts are accepted
    whole      block: the last test that succeeds counts; else the first that fails
    """

    targets: Sequence[Distribution]
    proposals: Sequence[Distribution]
    chances: tuple[float, ...]
    weights: tuple[float, ...]
    whole: bool

    def num_accepted(self, luck: Sequence[float]) -> int:
        """How many drafts are accepted, given [n] uniform numbers in [0, 1)."""
        passed = [u < chance for u, chance in zip(luck, self.chances, strict=True)]
        if self.whole:
            return max((i + 1 for i, ok in enumerate(passed) if ok), default=0)
        return passed.index(False) if False in passed else len(passed)

    def following(self, num_accepted: int) -> Distribution:
        """What the token after the accepted drafts is sampled from."""
        p = self.targets[num_accepted]
        if num_accepted == len(self.chances):
            return p
        rest = p.minus(self.proposals[num_accepted], self.weights[num_accepted])
        # Where rounding leaves nothing of the rest, p and q are alike: then p itself is right.
        return Distribution(p.ids, rest) if rest.any() else p


def token_trial(
    targets: Sequence[Distribution], drafts: Sequence[int], proposals: Sequence[Distribution]
) -> Trial:
    """Token verification of n drafts; arguments as in `Trial`."""
    chances = [
        min(1.0, p.of_token(draft) / q.of_token(draft))
        for draft, p, q in zip(drafts, targets, proposals, strict=False)
    ]
    return Trial(targets, proposals, tuple(chances), (1.0,) * (len(drafts) + 1), whole=False)


def block_trial(
    targets: Sequence[Distribution], drafts: Sequence[int], proposals: Sequence[Distribution]
) -> Trial:
    """Block verification of n drafts; arguments as in `Trial`."""
    weights = [1.0]
    for draft, p, q in zip(drafts, targets, proposals, strict=False):
        weights.append(min(1.0, weights[-1] * p.of_token(draft) / q.of_token(draft)))
    chances = weights[1:]
    for i in range(1, len(drafts)):
        over = float(targets[i].minus(proposals[i], weights[i]).sum())
        short = over + 1.0 - weights[i]
        # Nothing over and nothing short: p and q are alike behind draft i, so the test of the next
        # one succeeds for certain, and this one does not matter.
        chances[i - 1] = over / short if short > 0 else 1.0
    return Trial(targets, proposals, tuple(chances), tuple(weights), whole=True)
