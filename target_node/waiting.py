"""What one text waits for: its drafter's answer (pure).

A verdict puts the root somewhere, and a draft that hangs on that root is the answer to it, even if
it comes when the root has moved on. So the time between the two is known also where nothing was
waited for: without that, a drafter that is farther away than one pass would always come too late,
and nobody would ever learn how late. The first draft of a life answers an `Open`, with all its
prefill, and is not measured.

Whether a wait pays is a price (`node/price.py`). What is not waited for cannot be measured, so now
and then it is. So it is also when no draft was there after more passes alone than bad luck
explains: then the drafter is too far away to get ahead while the target goes on.
"""

from node.acceptance import FIRST_OF_MODEL, Acceptance
from node.costs import Costs
from node.price import verifying_pays, wait_limit_s, waiting_pays
from proto.messages import Cause, Draft, Open, Rule

NUM_LATE_UNTIL_QUIET = 2
NUM_FIRST = 4  # waits that are made to learn how long they are
NUM_SKIPPED_MAX = 32  # waits in a row that are left out before one is made to learn
UNLIKELY = 0.01  # so rarely would bad luck alone have kept drafts away
MAX_TOLD = 64


class Waiting:
    """The waits of one text, in one life of it; questions ask, facts are told."""

    def __init__(self, opened: Open, costs: Costs, acceptance: Acceptance) -> None:
        self._opened = opened
        self._costs = costs
        self._acceptance = acceptance
        # A drafter is not waited for before it is heard: the first token must not pay for it.
        self._num_late = NUM_LATE_UNTIL_QUIET  # passes in a row that waited in vain
        self._told_at: dict[int, float] = {}  # root -> when its verdict was sent; the newest ones
        self._is_waiting = False  # a wait has begun: it is not given up before its limit
        self._num_in_vain = 0  # passes begun alone since one had drafts
        self._heard_at = 0.0  # when the last draft came

    # -- questions --------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the drafter is not waited for, because it has let so many deadlines pass."""
        return self._num_late >= NUM_LATE_UNTIL_QUIET

    @property
    def limit_s(self) -> float:
        """How long a wait may take."""
        return wait_limit_s(self._opened.policy, self._costs)

    def reason(self, wanted: int, num_texts: int = 1, *, is_late: bool) -> Cause | None:
        """Why to start with fewer drafts than `wanted`. None: wait on; not if it `is_late`.

        num_texts  that share the passes
        """
        policy = self._opened.policy
        if self.is_over:
            return Cause.QUIET
        # One that waits for every verdict brings nothing meanwhile, and under the classical rules
        # what the target samples alone is hardly ever what was drafted.
        is_ahead = policy.window > policy.launch_min and self._opened.rule is Rule.COUPLED
        if is_ahead and not self._is_waiting and not self._pays(wanted, num_texts):
            return Cause.CHEAP
        return Cause.LATE if is_late else None

    def _pays(self, wanted: int, num_texts: int) -> bool:
        costs = self._costs
        if costs.wait.num < NUM_FIRST or costs.num_skipped >= NUM_SKIPPED_MAX:
            return True
        p = self._acceptance.chance(FIRST_OF_MODEL)
        if (1 - p) ** self._num_in_vain < UNLIKELY:
            return True
        policy = self._opened.policy
        is_priced = policy.rest_after > 0  # drafts are verified where that pays
        if is_priced and not verifying_pays(p, wanted, num_texts, costs.passes(num_texts)):
            return False
        return waiting_pays(p, wanted, policy.num_speculative_tokens, costs)

    # -- facts ------------------------------------------------------------------------------------

    def began(self) -> None:
        """There was no reason to start."""
        self._is_waiting = True

    def went_along(self) -> None:
        """The wait is cut short by a pass that others have a reason for: nothing is learnt."""
        self._is_waiting = False

    def started(self, cause: Cause, ready_at: float) -> None:
        """A pass begins that verifies drafts, or could have; it could have begun at `ready_at`."""
        if cause is Cause.LATE:
            self._num_late += 1
        elif cause is Cause.CHEAP:
            self._costs.skipped()
            self._num_in_vain += 1
        elif cause is Cause.READY and self._is_waiting:
            # What came after the last draft was for the sake of other texts.
            self._costs.waited(max(0.0, self._heard_at - ready_at))
        self._is_waiting = False

    def had_drafts(self) -> None:
        """A pass had drafts of the drafter's at hand."""
        self._num_in_vain = 0

    def told(self, root: int, now: float) -> None:
        """A verdict that moves the root was sent."""
        self._told_at[root] = now
        if len(self._told_at) > MAX_TOLD:
            del self._told_at[next(iter(self._told_at))]

    def heard(self, draft: Draft, now: float, *, first_of_life: bool) -> None:
        """A draft has come, whatever becomes of it."""
        self._num_late = 0
        self._heard_at = now
        if draft.tokens and draft.first_number == draft.number:  # else it was said again, for free
            self._costs.draft.add(draft.model_us / 1e6 / len(draft.tokens))
        told_at = self._told_at.pop(draft.parent_hash, None)  # the first one is the answer
        if told_at is not None and not first_of_life:
            self._costs.reply.add(now - told_at)

    def woke(self) -> None:
        """The drafter has rested: it has much to read first, and its first draft is no answer."""
        self._num_late = NUM_LATE_UNTIL_QUIET
        self._told_at.clear()
