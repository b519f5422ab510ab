"""The classical rules (speculative sampling): accept drafts by the ratio p/q, correct a rejection.

Theory of operation
-------------------
The drafter samples each token x from a distribution q and sends exactly that q; the target knows
its own p. Both are the distributions after temperature and cuts.

    token    accept x with chance min(1, p(x)/q(x)), one draft after the other; at the first
             rejection sample from (p - q)+, renormalised (Leviathan et al., arXiv 2211.17192,
             algorithm 1; Chen et al., 2302.01318, algorithm 2)
    block    judge all n drafts together: w_0 = 1, w_i = min(1, w_{i-1} p(x_i)/q(x_i)). Each i has
             a test of its own, and the largest i whose test succeeds is the number of accepted
             drafts. The chance of the test is w_n for i = n, and for i < n it is
             S_i / (S_i + 1 - w_i), where S_i is the sum over x of (w_i p - q)+ after x_i. The next
             token is sampled from (w_i p - q)+, renormalised (Sun et al., 2403.10444, algorithm
             2). On average it accepts no fewer tokens than `token`.

If all drafts are accepted, one more token is sampled from p itself. All tests are `u < c` with u in
[0, 1), so a test with chance zero never succeeds. docs/speculative-decoding.md has the proofs.

Random numbers: drafts, acceptance tests and corrections have keys of their own; each key contains
the life (one opening of a text) and a number that is used once in it. If the random numbers
depended on the position alone, a second draft at a position would be the same token as the first
one, which has just been rejected, and the text would be biased.

Everything here is float64 on the host, without torch.
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

# Most tokens of a drafter's distribution q: each of them is sent in the message with the draft.
MAX_CANDIDATES = 64


class Purpose(IntEnum):
    """What a random number is used for; different purposes get independent numbers."""

    DRAFT = 0
    ACCEPT = 1
    CORRECT = 2


@dataclass(frozen=True, slots=True)
class Distribution:
    """A probability distribution over tokens; tokens that are not in `ids` have probability zero.

    ids    [m] int64, ascending, each once
    probs  [m] float64, not negative, not all zero; `pick` divides by their sum
    """

    ids: Ids
    probs: Probabilities

    @staticmethod
    def of(
        ids: Sequence[int] | Ids, weights: Sequence[float] | Probabilities | Weights
    ) -> "Distribution":
        """Return the distribution of `ids` [m], in any order, with `weights` [m] of any sum."""
        order = np.argsort(ids)
        probs = np.asarray(weights, dtype=np.float64)[order]
        return Distribution(np.asarray(ids, dtype=np.int64)[order], probs / probs.sum())

    def at(self, ids: Ids) -> Probabilities:
        """Return the probabilities of the tokens `ids` [k], float64 [k]."""
        where = np.searchsorted(self.ids, ids).clip(max=len(self.ids) - 1)
        return np.where(self.ids[where] == ids, self.probs[where], 0.0)

    def of_token(self, token: int) -> float:
        """Return the probability of one token."""
        return float(self.at(np.array([token]))[0])

    def pick(self, u: float) -> int:
        """Return the token sampled with the uniform number `u` in [0, 1), by inverting the CDF.

        Never returns a token of probability zero.
        """
        sums = self.probs.cumsum()
        index = int(np.searchsorted(sums, u * sums[-1], side="right"))
        # u * sum may round up to the sum itself.
        return int(self.ids[min(index, int(np.flatnonzero(self.probs)[-1]))])

    def minus(self, other: "Distribution", weight: float = 1.0) -> Probabilities:
        """Return max(weight * self - other, 0) at `self.ids`, float64 [m]; it is zero elsewhere."""
        difference: Probabilities = np.maximum(weight * self.probs - other.at(self.ids), 0.0)
        return difference


def uniform(seed: int, purpose: Purpose, life: int, number: int, index: int = 0) -> float:
    """Return a uniform number in [0, 1) with 53 bits, a keyed hash of the arguments (64 bits each).

    life    number of one opening of a text (`judging.life_of`)
    number  number that this life uses once for this purpose
    index   distinguishes the random numbers of one judgement
    """
    data = struct.pack("<4Q", purpose, life, number, index)
    key = (seed & (1 << 64) - 1).to_bytes(8, "little")
    word = int.from_bytes(blake2b(data, digest_size=8, key=key).digest(), "little")
    return (word >> 11) * 2.0**-53


def truncated(distribution: Distribution, limit: int = MAX_CANDIDATES) -> tuple[Ids, Weights]:
    """Return the `limit` likeliest tokens: ids [m] int64 ascending, and weights [m] float32.

    Of equally likely tokens the lowest ids are kept; tokens of weight zero are dropped. A drafter
    samples from `Distribution.of` these and sends exactly these, so that the target knows q
    exactly although the message is short.
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
    """The acceptance tests of n drafts, before random numbers decide them.

    targets    [n + 1]: the target's p at each draft's position, and after the last draft
    proposals  [n]: the drafter's q at each draft's position
    chances    [n]: the chance with which each draft's test succeeds
    weights    [n + 1]: weights[i] multiplies p in the correction after i accepted drafts
    whole      True (block): the last test that succeeds decides; False (token): the first that
               fails
    """

    targets: Sequence[Distribution]
    proposals: Sequence[Distribution]
    chances: tuple[float, ...]
    weights: tuple[float, ...]
    whole: bool

    def num_accepted(self, luck: Sequence[float]) -> int:
        """Return how many drafts are accepted, given [n] uniform random numbers in [0, 1)."""
        passed = [u < chance for u, chance in zip(luck, self.chances, strict=True)]
        if self.whole:
            return max((i + 1 for i, ok in enumerate(passed) if ok), default=0)
        return passed.index(False) if False in passed else len(passed)

    def following(self, num_accepted: int) -> Distribution:
        """Return the distribution from which the token after the accepted drafts is sampled.

        p itself if all drafts are accepted, else (weight p - q)+, not renormalised.
        """
        p = self.targets[num_accepted]
        if num_accepted == len(self.chances):
            return p
        rest = p.minus(self.proposals[num_accepted], self.weights[num_accepted])
        # If rounding leaves nothing of (p - q)+, p and q are equal: then p itself is right.
        return Distribution(p.ids, rest) if rest.any() else p


def token_trial(
    targets: Sequence[Distribution], drafts: Sequence[int], proposals: Sequence[Distribution]
) -> Trial:
    """Return the acceptance tests of token verification (rejection sampling) of n drafts.

    Source: arXiv 2211.17192, algorithm 1. `targets` and `proposals` as in `Trial`; drafts [n] are
    token ids.
    """
    chances = [
        min(1.0, p.of_token(draft) / q.of_token(draft))
        for draft, p, q in zip(drafts, targets, proposals, strict=False)
    ]
    return Trial(targets, proposals, tuple(chances), (1.0,) * (len(drafts) + 1), whole=False)


def block_trial(
    targets: Sequence[Distribution], drafts: Sequence[int], proposals: Sequence[Distribution]
) -> Trial:
    """Return the acceptance tests of block verification of n drafts.

    Source: arXiv 2403.10444, algorithm 2. `targets` and `proposals` as in `Trial`; drafts [n] are
    token ids.
    """
    weights = [1.0]
    for draft, p, q in zip(drafts, targets, proposals, strict=False):
        weights.append(min(1.0, weights[-1] * p.of_token(draft) / q.of_token(draft)))
    chances = weights[1:]
    for i in range(1, len(drafts)):
        over = float(targets[i].minus(proposals[i], weights[i]).sum())
        short = over + 1.0 - weights[i]
        # If both are zero, p and q are equal after draft i: then the test of the next draft
        # succeeds for certain, and the result of this one does not matter.
        chances[i - 1] = over / short if short > 0 else 1.0
    return Trial(targets, proposals, tuple(chances), tuple(weights), whole=True)
