"""A target and a drafter that really sample, and the distribution of what they must write.

Three symbols; the next-token distributions are functions of the whole path. Everything that draws
numbers is a method of its own, so that a test can plant a mistake there.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np

from drafter_node import compute as drafter
from engine.choice.classical_rules import (
    Distribution,
    Purpose,
    Trial,
    block_trial,
    token_trial,
    truncated,
    uniform,
)
from proto.messages import Proposal, Rule
from rehearsal.cache import fold
from rehearsal.timeline import mix
from target_node import compute as target
from tests.noise import gumbel

NUM_SYMBOLS = 3
TRIALS = {Rule.TOKEN: token_trial, Rule.BLOCK: block_trial}
ALL_IDS = np.arange(NUM_SYMBOLS, dtype=np.int64)


@cache
def distribution(digest: int, salt: int) -> Distribution:
    """A distribution of the symbols for a path: from nearly certain to nearly flat."""
    words = [mix(digest ^ mix(salt + symbol)) for symbol in range(NUM_SYMBOLS)]
    return Distribution.of(ALL_IDS, [0.03 + (word / 2**64) ** 2 for word in words])


class Sampling:
    """The models of a world in which texts are drawn at random. See `rehearsal.world.Models`."""

    def __init__(self, salt: int = 3) -> None:
        self.salt = salt
        self.num_accepted = 0
        self.num_judged = 0

    def p(self, digest: int) -> Distribution:
        """p behind a path."""
        return distribution(digest, self.salt)

    def q(self, digest: int) -> Distribution:
        """q behind a path."""
        return distribution(digest, ~self.salt)

    # -- the drafter ------------------------------------------------------------------------------

    def draft(
        self, part: drafter.Part, digests: Sequence[int], _index: int
    ) -> tuple[drafter.Children, ...]:
        """What the drafter proposes behind each path that was asked for."""
        pairs = zip(digests, part.positions, strict=True)
        return tuple(self._children(part, digest, position) for digest, position in pairs)

    def _children(self, part: drafter.Part, digest: int, position: int) -> drafter.Children:
        ids, weights = truncated(self.q(digest))
        q = Distribution.of(ids, weights)
        if part.sampled_in is None:
            ranked = self.ranked(q, part.opened.sampling.seed, position)
            tokens = ranked[: part.opened.policy.branches]
            return drafter.Children(tokens, tuple(-1.0 - rank for rank in range(len(tokens))))
        tokens = self.drafts(part, q)
        scores = tuple(float(np.log(q.of_token(token))) for token in tokens)
        sent = (Proposal(tuple(ids.tolist()), tuple(weights.tolist())),) * len(tokens)
        return drafter.Children(tokens, scores, sent)

    def drafts(self, part: drafter.Part, q: Distribution) -> tuple[int, ...]:
        """The drafted token (tuples are for mistakes)."""
        return (q.pick(self.draft_luck(part)),)

    def draft_luck(self, part: drafter.Part) -> float:
        """The number that decides a draft."""
        assert part.sampled_in is not None
        return uniform(part.opened.sampling.seed, Purpose.DRAFT, part.sampled_in, part.number)

    # -- the target -------------------------------------------------------------------------------

    def verify(self, part: target.Part, digests: Sequence[int]) -> target.Outcome:
        """What the target says behind each path that was asked for."""
        targets = [self.p(digest) for digest in digests]
        if part.judge is None:
            seed = part.opened.sampling.seed
            chosen = zip(targets, part.positions, strict=True)
            return target.Outcome(tuple(self.coupled(p, seed, at) for p, at in chosen))
        wanted = part.judge
        proposals = [Distribution.of(sent.ids, sent.probs) for sent in wanted.proposals]
        trial = TRIALS[wanted.rule](targets, wanted.drafts, proposals)
        accepted = self.judge(trial, part)
        token = trial.following(accepted).pick(self.correction_luck(part))
        self.num_judged += len(wanted.drafts)
        self.num_accepted += accepted
        return target.Outcome((*wanted.drafts[:accepted], token), accepted)

    def judge(self, trial: Trial, part: target.Part, attempt: int = 0) -> int:
        """How many drafts are accepted."""
        assert part.judge is not None
        seed, life = part.opened.sampling.seed, part.judge.incarnation
        number = (attempt << 32) + part.number
        luck = [
            uniform(seed, Purpose.ACCEPT, life, number, index)
            for index in range(len(trial.chances))
        ]
        return trial.num_accepted(luck)

    def correction_luck(self, part: target.Part) -> float:
        """The number that decides the token after the accepted drafts."""
        assert part.judge is not None
        seed, life = part.opened.sampling.seed, part.judge.incarnation
        return uniform(seed, Purpose.CORRECT, life, part.number)

    @classmethod
    def coupled(cls, of: Distribution, seed: int, position: int) -> int:
        """The choice with the noise that both sides share."""
        return cls.ranked(of, seed, position)[0]

    @staticmethod
    def ranked(of: Distribution, seed: int, position: int) -> tuple[int, ...]:
        """All choices with that noise, best first."""
        noise = gumbel(seed, 0, (position,), of.ids[None])[0]
        with np.errstate(divide="ignore"):
            order = np.argsort(-(np.log(of.probs) + noise), kind="stable")
        return tuple(of.ids[order].tolist())

    # -- the truth --------------------------------------------------------------------------------

    def joint(self, prompt: Sequence[int], length: int) -> dict[tuple[int, ...], float]:
        """The exact chance of every text of `length` symbols after a prompt."""
        start = 0
        for token in prompt:
            start = fold(start, token)
        chances = {}
        for text in product(range(NUM_SYMBOLS), repeat=length):
            digest, chance = start, 1.0
            for symbol in text:
                chance *= self.p(digest).of_token(symbol)
                digest = fold(digest, symbol)
            chances[text] = chance
        return chances
