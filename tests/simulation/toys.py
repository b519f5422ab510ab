"""Toy models, small enough to run thousands of texts.

The toy target's next token is a hash of the digest of its path (`rehearsal.cache`), so it depends
on the whole prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from proto.messages import FinishReason, Limits
from rehearsal.cache import fold
from rehearsal.timeline import BITS_64, mix

LIKELY = -0.125  # score of the drafter's first choice


@dataclass(frozen=True, slots=True)
class ToyModel:
    """The target, and a drafter that agrees with it now and then, as functions of a path's digest.

    agreement     chance that the drafter's first choice is the target's (the path decides); where
                  it is not, the second is in half of the cases
    num_children  choices that the drafter makes at once, the likeliest first
    stop_ids      ids from `vocab_size` on; one of them is the target's choice at `stop_rate`
    """

    salt: int
    vocab_size: int
    agreement: float
    num_children: int = 1
    stop_ids: tuple[int, ...] = ()
    stop_rate: float = 0.0

    def choose(self, digest: int) -> int:
        """The target's next token."""
        value = mix(digest ^ self.salt)
        if self.stop_ids and (value >> 40) / (1 << 24) < self.stop_rate:
            return self.stop_ids[value % len(self.stop_ids)]
        return value % self.vocab_size

    def propose(self, digest: int, index: int = 0) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The next tokens of the drafter of this index, and their scores."""
        value = mix(digest ^ ~self.salt & BITS_64 ^ index << 32)
        right = self.choose(digest)
        size = self.vocab_size + len(self.stop_ids)
        shift = 0 if (value >> 40) / (1 << 24) < self.agreement else 1 + value % (size - 1)
        tokens = [(right + shift + index) % size for index in range(self.num_children)]
        if self.num_children > 1 and right not in tokens and value >> 8 & 1:
            tokens[1] = right
        return tuple(tokens), tuple(LIKELY - index for index in range(self.num_children))

    def complete(
        self, prompt: Sequence[int], limits: Limits
    ) -> tuple[tuple[int, ...], FinishReason]:
        """The whole text that the target alone would write, and why it ends."""
        text, digest = list(prompt), 0
        for token in prompt:
            digest = fold(digest, token)
        while True:
            token = self.choose(digest)
            digest = fold(digest, token)
            text.append(token)
            if token in limits.stop_ids:
                return tuple(text), FinishReason.STOP
            if len(text) == limits.max_len:
                return tuple(text), FinishReason.LENGTH
