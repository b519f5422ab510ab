"""How long the target waits for drafts (pure). Every wait is made of measured costs.

A verdict puts the root somewhere, and a draft that hangs on that root is the answer to it, even if
it comes when the root has moved on. So the time between the two is known also where nothing was
waited for: without that, a drafter that is farther away than one pass would always come too late,
and nobody would ever learn how late. The first draft of a life answers an `Open`, with all its
prefill, and is not measured.
"""

from proto.messages import Cause, Draft, Open, Policy, Rule
from target_node.resting import Resting, kind_of
from target_node.worth import Worth

NUM_LATE_UNTIL_QUIET = 2
WAIT_S_MIN, WAIT_S_MAX = 0.002, 2.0
REPLY_MARGIN = 4.0
AVERAGE_WEIGHT = 0.1  # of the newest figure in a running mean
MAX_TOLD = 64


class Patience:
    """What waiting has been worth so far."""

    def __init__(self) -> None:
        self._num_late = NUM_LATE_UNTIL_QUIET  # passes in a row that waited in vain
        self._told_at: dict[int, float] = {}  # root -> when its verdict was sent; the newest ones
        self._pass_s = 0.0  # running mean of a pass; 0: not known, as in the other two
        self._draft_s = 0.0  # of one drafted token
        self._reply_s = 0.0  # of the time from a verdict to the drafts that answer it
        self._is_waiting = False
        self._is_decoding = False  # the pass that runs
        self._worth = Worth()
        self._resting = Resting()

    @property
    def is_over(self) -> bool:
        """Whether the drafter is not waited for, because it has let so many deadlines pass."""
        return self._num_late >= NUM_LATE_UNTIL_QUIET

    @property
    def chance(self) -> float:
        """How often a token of the drafter's is right, given those before it."""
        return self._worth.chance

    def limit_s(self, policy: Policy) -> float:
        """How long to wait for drafts: amply what they usually take, at least a pass.

        So many drafts save so many passes at most, and a drafter that runs ahead can catch up while
        the target goes on alone: for it, no wait is longer than that. One that waits for every
        verdict (`sync`) could never catch up.
        """
        expected_s = max(self._reply_s, policy.launch_min * self._draft_s)
        limit_s = max(REPLY_MARGIN * expected_s, self._pass_s)
        if policy.window > policy.launch_min:
            limit_s = min(limit_s, policy.launch_min * self._pass_s)
        return min(WAIT_S_MAX, max(WAIT_S_MIN, limit_s))

    def reason(self, opened: Open, wanted: int, *, is_late: bool) -> Cause | None:
        """Why to start with fewer drafts than `wanted`. None: wait on; not if it `is_late`."""
        policy = opened.policy
        if self.is_over:
            return Cause.QUIET
        # One that waits for every verdict brings nothing meanwhile, and under the classical rules
        # what the target samples alone is hardly ever what was drafted.
        is_ahead = policy.window > policy.launch_min and opened.rule is Rule.COUPLED
        if is_ahead and not self._is_waiting:
            most = policy.num_speculative_tokens
            if not self._worth.pays(wanted, most, self._pass_s):
                return Cause.CHEAP
        self._is_waiting = True
        return Cause.LATE if is_late else None

    def started(self, cause: Cause, waited_s: float) -> None:
        """A pass that verifies drafts, or could have, begins after so long a wait."""
        self._is_decoding = True
        if cause is Cause.LATE:
            self._num_late += 1
        elif cause is Cause.CHEAP:
            self._worth.skipped()
        elif cause is Cause.READY and self._is_waiting:
            self._worth.waited(waited_s)
        self._is_waiting = False

    def judged(self, num_drafted: int, num_accepted: int) -> None:
        """What became of drafts of the drafter's: so many were right, and not the next one."""
        self._worth.judged(num_drafted, num_accepted)

    def without_drafter(self, policy: Policy, most: int) -> Cause | None:
        """Why no drafter is expected, if a pass verifies at most so many drafts. None: one is."""
        if self._resting.now:
            return Cause.RESTING
        return Cause.ALONE if most == 0 or not policy.has_drafter else None

    def opened(self, message: Open) -> None:
        """A drafter is not waited for before it is heard: the first token must not pay for it."""
        self._resting.opened(kind_of(message), message.policy.rest_after)
        self._num_late = NUM_LATE_UNTIL_QUIET
        self._told_at.clear()
        self._is_waiting = self._is_decoding = False

    def passed(self, num_tokens: int, seconds: float) -> None:
        """A pass has made so many tokens, so long after it could have started."""
        rested, is_decoding = self._resting.now, self._is_decoding
        self._is_decoding = False
        if is_decoding:  # and not a prefill, which has its own price
            self._resting.passed(num_tokens, seconds)
        if rested and not self._resting.now:
            # The drafter has much to read first, and its first draft is no answer.
            self._num_late = NUM_LATE_UNTIL_QUIET
            self._told_at.clear()

    def told(self, root: int, now: float, pass_s: float | None) -> None:
        """A pass has ended in a verdict that moves the root. None: a prefill, however long."""
        if pass_s is not None:
            self._pass_s = _mean(self._pass_s, pass_s)
        self._told_at[root] = now
        if len(self._told_at) > MAX_TOLD:
            del self._told_at[next(iter(self._told_at))]

    def heard(self, draft: Draft, now: float, *, first_of_life: bool) -> None:
        """A draft has come, whatever becomes of it."""
        self._resting.heard()
        self._num_late = 0
        if draft.tokens and draft.first_number == draft.number:  # else it was said again, for free
            self._draft_s = _mean(self._draft_s, draft.model_us / 1e6 / len(draft.tokens))
        told_at = self._told_at.pop(draft.parent_hash, None)  # the first one is the answer
        if told_at is not None and not first_of_life:
            self._reply_s = _mean(self._reply_s, now - told_at)


def _mean(mean: float, value: float) -> float:
    """A running mean that starts at the first value."""
    return value if mean == 0.0 else mean + AVERAGE_WEIGHT * (value - mean)
