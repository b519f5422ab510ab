"""What one text waits for: its drafter's answer (pure).

A verdict puts the root somewhere. Where nothing hangs there yet, the first draft that does is the
answer to it, even if it comes when the root has moved on. So the time between the two is known also
where nothing was waited for: without that, a drafter that is farther away than one pass would
always come too late, and nobody would ever learn how late. What has come during a pass is heard
when it ends, and says only that the answer took no longer. The first draft of a life answers an
`Open`, with all its prefill, and is not measured.

Whether a wait pays is a price (`economics.py`). What is not waited for cannot be measured, so now
and then it is. So it is also when no draft was there after more passes alone than bad luck
explains: then the drafter is too far away to get ahead while the target goes on.

    began                 there is no reason to start a pass     -> WAITING
    started, went_along   a pass begins, with it or beside it    -> BLIND, until the next `began`

A life begins FRESH. A wait that has begun is not given up before its limit. While BLIND, perhaps no
message has been looked for since the pass began: so it is where the host computes by itself, and
there a pass that is taken for an answer costs up to 13 % (docs/LOG.md). Where messages are heard
during a forward, BLIND changes nothing that is measurable.
"""

from dataclasses import dataclass
from enum import Enum, auto

from node.economics import (
    FIRST_OF_MODEL,
    Acceptance,
    Costs,
    drafts_worth_awaiting,
    verifying_pays,
    wait_limit_s,
    waiting_pays,
)
from proto.messages import OWN_SOURCES, Cause, Draft, Open, Rule

NUM_LATE_UNTIL_QUIET = 2
FIRST_REPLY_S = 0.5  # an answer takes no longer, as long as none is known
NUM_FIRST = 4  # waits that are made to learn how long they are
NUM_SKIPPED_MAX = 32  # waits in a row that are left out before one is made to learn
UNLIKELY = 0.01  # so rarely would bad luck alone have kept drafts away
MAX_TOLD = 64
MOST_AWAITED = 8  # drafts in a row, by price


@dataclass(frozen=True, slots=True)
class Ready:
    """What a text has to say of a pass that could start now.

    cause        why it should; None: drafts are waited for
    deadline     until when they are
    since        when a pass with this text could have started
    num_missing  committed tokens that the cache lacks: rows of the pass besides drafts
    num_awaited  tokens that the drafts which are waited for are expected to bring
    may_join     it can go along with others that have a cause; not twice in a row
    """

    cause: Cause | None
    deadline: float
    since: float
    num_missing: int
    num_awaited: float
    may_join: bool


class State(Enum):
    """What a text was found doing last; the table is above."""

    FRESH = auto()
    WAITING = auto()
    BLIND = auto()


class Waiting:
    """The waits of one text, in one life of it; questions ask, facts are told."""

    def __init__(self, opened: Open, costs: Costs, acceptance: Acceptance) -> None:
        self._opened = opened
        self._costs = costs
        self._acceptance = acceptance
        # A drafter is not waited for before it is heard: the first token must not pay for it.
        self._num_late = NUM_LATE_UNTIL_QUIET  # passes in a row that waited in vain
        self._told_at: dict[int, float] = {}  # root -> when its verdict was sent; the newest ones
        self._state = State.FRESH
        self._pass_at = 0.0  # when the last pass began
        self._num_in_vain = 0  # passes begun alone since one had drafts
        self._heard_at = 0.0  # when the last draft came

    # -- questions --------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the drafter is not waited for, because it has let so many deadlines pass."""
        return self._num_late >= NUM_LATE_UNTIL_QUIET

    def num_wanted(self, most: int, *, is_hit: bool) -> int:
        """With how many drafts in a row a pass starts, if it verifies at most so many.

        is_hit  all drafts of the last pass were accepted
        """
        policy, costs = self._opened.policy, self._costs
        least = min(policy.launch_hit if is_hit else policy.launch_min, most)
        if not policy.prices_waits or costs.reply.num < NUM_FIRST or not costs.pass_s:
            return least
        p = self._acceptance.chance(FIRST_OF_MODEL)
        number = drafts_worth_awaiting(p, min(most, MOST_AWAITED), costs)
        return least if number == 0 and self._is_in_vain(p) else number

    def _is_in_vain(self, p: float) -> bool:
        """Whether nothing is at hand so often that the drafter must be too far away."""
        is_forgotten = self._costs.num_skipped >= NUM_SKIPPED_MAX
        return is_forgotten or (1 - p) ** self._num_in_vain < UNLIKELY

    def limit_s(self, wanted: int) -> float:
        """How long a wait for so many drafts may take."""
        is_ahead = self._opened.policy.window > wanted
        return wait_limit_s(wanted, self._costs, is_ahead=is_ahead)

    def reason(self, wanted: int, num_texts: int, *, is_late: bool) -> Cause | None:
        """Why to start with fewer drafts than `wanted`. None: wait on; not if it `is_late`.

        num_texts  that share the passes
        """
        if self.is_over:
            return Cause.QUIET
        has_begun = self._state is State.WAITING
        if not has_begun and self._is_priced(wanted) and not self._pays(wanted, num_texts):
            return Cause.CHEAP
        return Cause.LATE if is_late else None

    def _is_priced(self, wanted: int) -> bool:
        """Whether not to wait is thought of.

        A drafter that waits for every verdict brings nothing meanwhile, and under the classical
        rules what the target samples alone is hardly ever what was drafted.
        """
        policy = self._opened.policy
        is_ahead = policy.window > wanted and self._opened.rule is Rule.COUPLED
        return is_ahead and policy.is_priced

    def _pays(self, wanted: int, num_texts: int) -> bool:
        costs = self._costs
        p = self._acceptance.chance(FIRST_OF_MODEL)
        if costs.wait.num < NUM_FIRST or self._is_in_vain(p):
            return True
        policy = self._opened.policy
        if not verifying_pays(p, wanted, num_texts, costs.passes(num_texts)):
            return False
        if policy.prices_waits:
            return True  # as many as are worth it are wanted
        return waiting_pays(p, wanted, policy.num_speculative_tokens, costs)

    def is_unheard(self, said_at: float, now: float) -> bool:
        """Whether a drafter that has not heard what was said then will not hear it any more."""
        reply = self._costs.reply
        return now - said_at > (reply.slow_s if reply.num else FIRST_REPLY_S)

    # -- facts ------------------------------------------------------------------------------------

    def began(self) -> None:
        """There was no reason to start."""
        self._state = State.WAITING

    def went_along(self, now: float) -> None:
        """The wait is cut short by a pass that others have a reason for: nothing is learnt."""
        self._state, self._pass_at = State.BLIND, now

    def started(self, cause: Cause, ready_at: float, now: float) -> None:
        """A pass begins that verifies drafts, or could have; it could have begun at `ready_at`."""
        has_waited = self._state is State.WAITING
        self._state, self._pass_at = State.BLIND, now
        if cause is Cause.LATE:
            self._num_late += 1
        elif cause is Cause.CHEAP:
            self._costs.skipped()
            self._num_in_vain += 1
        elif cause is Cause.READY and has_waited:
            # What came after the last draft was for the sake of other texts.
            self._costs.waited(max(0.0, self._heard_at - ready_at))

    def had_drafts(self) -> None:
        """A pass had drafts of the drafter's at hand."""
        self._num_in_vain = 0

    def told(self, root: int, now: float) -> None:
        """A verdict was sent that moves the root to where no draft hangs."""
        self._told_at[root] = now
        if len(self._told_at) > MAX_TOLD:
            del self._told_at[next(iter(self._told_at))]

    def heard(self, draft: Draft, now: float, *, first_of_life: bool) -> None:
        """A draft has come, whatever becomes of it. Nobody waits for those of the target's own."""
        if draft.source in OWN_SOURCES:
            return
        self._num_late = 0
        self._heard_at = now
        if draft.tokens and draft.first_number == draft.number:  # else it was said again, for free
            self._costs.draft.add(draft.model_us / 1e6 / max(1, draft.num_steps))
        told_at = self._told_at.pop(draft.parent_hash, None)  # the first one is the answer
        if told_at is not None and draft.num_steps and not first_of_life:
            self._answered(told_at, now)

    def _answered(self, told_at: float, now: float) -> None:
        """What has come during a pass is heard when that ends: then only bounds are known."""
        reply, took = self._costs.reply, now - told_at
        if self._state is State.BLIND:
            # At first a draft step: a pass taken for an answer would be waited for never again.
            usual = reply.value if reply.num else self._costs.draft.value
            at_least = max(0.0, self._pass_at - told_at)
            took = min(max(usual, at_least), took)
        reply.add(took)

    def woke(self) -> None:
        """The drafter has rested: it has much to read first, and its first draft is no answer."""
        self._num_late = NUM_LATE_UNTIL_QUIET
        self._told_at.clear()
