"""Whether the target should wait for drafts where it has none (pure).

Theory of operation
-------------------
After a rejection the drafter has nothing to offer for a while. The target can wait for the first
drafts, or go on alone: that costs a pass for one token, but the drafter runs ahead meanwhile, and
if its first draft is what the target says, all that hangs below it is there when the pass ends.

Two states, then: with drafts (a pass verifies K of them) and without. With acceptance p, a pass of
k drafts makes 1 + p + ... + p^k tokens, and drafts are there afterwards if all k and one more are
right: p^(k+1). From that follow the share of passes in either state and the tokens per second, once
for waiting (k drafts at the price of the wait) and once for going on (k = 0, no price). A wait that
is short beside a pass pays; so it does on a large target, and not on one whose pass costs as much
as a few draft steps and messages.

The figures are measured. What is not waited for cannot be measured, so now and then it is. So it is
also when no draft was there after more passes alone than bad luck explains: then the drafter is too
far away to get ahead while the target goes on.
"""

from target_node.rate import PRIOR_TRIES, Rate

NUM_FIRST = 4  # waits that are made to learn how long they are
NUM_SKIPPED_MAX = 32  # waits in a row that are left out before one is made to learn
UNLIKELY = 0.01  # so rarely would bad luck alone have kept drafts away
AVERAGE_WEIGHT = 0.1


class Worth:
    """What is known of waits and of drafts, over all texts."""

    def __init__(self) -> None:
        self._accepted = Rate(0.7 * PRIOR_TRIES)
        self._wait_s = 0.0  # running mean of the waits that ended with drafts
        self._num_waits = 0
        self._num_skipped = 0  # since the last one
        self._num_in_vain = 0  # since a pass had drafts

    @property
    def chance(self) -> float:
        """How often a draft is right, given those before it."""
        return self._accepted.chance

    def judged(self, num_drafted: int, num_accepted: int) -> None:
        """A pass has accepted so many of its drafts, and not the next one."""
        if num_drafted:
            self._num_in_vain = 0
        for index in range(min(num_accepted + 1, num_drafted)):
            self._accepted.add(right=index < num_accepted)

    def waited(self, seconds: float) -> None:
        """Drafts have come after so long a wait."""
        weight = max(AVERAGE_WEIGHT, 1 / (self._num_waits + 1))
        self._wait_s += weight * (seconds - self._wait_s)
        self._num_waits += 1
        self._num_skipped = 0

    def skipped(self) -> None:
        """A pass has begun without a wait that could have been made."""
        self._num_skipped += 1
        self._num_in_vain += 1

    def pays(self, wanted: int, most: int, pass_s: float) -> bool:
        """Whether to wait for `wanted` drafts, where a pass verifies at most `most`."""
        if self._num_waits < NUM_FIRST or self._num_skipped >= NUM_SKIPPED_MAX:
            return True
        p = self._accepted.chance
        if (1 - p) ** self._num_in_vain < UNLIKELY:
            return True
        waiting = tokens_per_second(p, wanted, most, pass_s, self._wait_s)
        return waiting > tokens_per_second(p, 0, most, pass_s, 0.0)


def tokens_per_second(p: float, first: int, most: int, pass_s: float, wait_s: float) -> float:
    """Tokens per second where a pass without drafts at hand waits `wait_s` for `first` of them."""
    enters, stays = p ** (first + 1), p ** (most + 1)
    share = enters / (enters + 1 - stays)  # of the passes that find drafts at hand
    tokens = (1 - share) * _tokens(p, first) + share * _tokens(p, most)
    return tokens / (pass_s + (1 - share) * wait_s)


def _tokens(p: float, num_drafts: int) -> float:
    """What a pass is expected to make of so many drafts."""
    return sum(p**i for i in range(num_drafts + 1))
