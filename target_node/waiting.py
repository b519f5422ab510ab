"""Decides how long one text waits for its drafter's answer, and measures the waits (pure).

A verdict moves the root (the last committed token). If no draft hangs there yet, the first draft
that does is the drafter's answer to this verdict, even if it arrives when the root has moved on. So
the time of an answer is also measured where the target did not wait: otherwise a drafter that needs
longer than one pass would always come too late, and it would never be known how late. A draft that
has arrived during a pass is received when the pass ends, so that only an upper limit of its time is
known. The first draft of a life answers an `Open`, with all its prefill, and is not measured.

`economics.py` decides from costs whether a wait pays. A wait that is not made cannot be measured,
so now and then one is made. One is also made if no draft was there after so many passes that bad
luck alone does not explain it: then the drafter is too far away to get ahead while the target goes
on.

    began                 there is no reason to start a pass        -> WAITING
    started, went_along   a pass begins, for this text or others    -> BLIND, until the next `began`

A life begins FRESH. A wait that has begun is not given up before its limit. While BLIND, perhaps no
messages have been received since the pass began. That is so if the host itself computes; there it
costs up to 13 % to mistake the pass for the time of an answer (docs/LOG.md). If messages are
received during a forward, BLIND makes no measurable difference.
"""

from dataclasses import dataclass
from enum import Enum, auto

from node.costs import Costs
from node.economics import (
    FIRST_OF_MODEL,
    Acceptance,
    drafts_worth_awaiting,
    least_chance,
    verifying_pays,
    wait_limit_s,
    waiting_pays,
)
from proto.messages import OWN_SOURCES, Cause, Draft, Open, Rule

NUM_LATE_UNTIL_QUIET = 2  # missed deadlines in a row after which the drafter counts as silent
FIRST_REPLY_S = 0.5  # assumed limit of an answer as long as none was measured
NUM_FIRST = 4  # waits that are made first, to measure how long they are
NUM_SKIPPED_MAX = 32  # possible waits in a row that are skipped before one is made to measure
UNLIKELY = 0.01  # below this probability, bad luck does not explain that no drafts were there
MAX_TOLD = 64
MOST_AWAITED = 8  # most drafts in a row to wait for, if costs decide


@dataclass(frozen=True, slots=True)
class Ready:
    """Whether a pass with this text should start now, and until when drafts are awaited.

    cause        why a pass should start; None: drafts are awaited
    deadline     until when they are awaited; now or earlier if there is a cause
    since        when a pass with this text could have started
    num_missing  committed tokens that the cache lacks: rows of the pass besides drafts
    num_awaited  tokens that awaited drafts are expected to add
    may_join     True: this text can join a pass that others have a cause for; not twice in a row
    """

    cause: Cause | None
    deadline: float
    since: float
    num_missing: int
    num_awaited: float
    may_join: bool


class State(Enum):
    """Where a text is: before its first wait or pass, waiting for drafts, or after a pass."""

    FRESH = auto()
    WAITING = auto()
    BLIND = auto()


class Waiting:
    """Measures and decides the waits of one text, for one life of it.

    in_turns  True: the drafter drafts nothing during the next pass (`node/placing.py`)
    """

    def __init__(self, opened: Open, costs: Costs, acceptance: Acceptance) -> None:
        self.in_turns = False
        self._opened = opened
        self._costs = costs
        self._acceptance = acceptance
        # Before its first draft a drafter counts as silent, so that the first token does not wait.
        self._num_late = NUM_LATE_UNTIL_QUIET  # waits in a row that have passed their deadline
        self._told_at: dict[int, float] = {}  # root -> when its verdict was sent; the newest ones
        self._state = State.FRESH
        self._pass_at = 0.0  # when the last pass began
        self._num_in_vain = 0  # passes that began without waiting since one had drafts
        self._heard_at = 0.0  # when the last draft arrived

    # -- questions --------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True if the target does not wait for the drafter, which has missed several deadlines."""
        return self._num_late >= NUM_LATE_UNTIL_QUIET

    def num_wanted(self, most: int, *, is_hit: bool) -> int:
        """Return with how many drafts in a row a pass starts that verifies at most `most`.

        is_hit  True: all drafts of the last pass were accepted
        """
        policy, costs = self._opened.policy, self._costs
        least = min(policy.launch_hit if is_hit else policy.launch_min, most)
        if not policy.prices_wanted or costs.reply.num < NUM_FIRST or not costs.pass_s:
            return least
        p = self._acceptance.chance(FIRST_OF_MODEL)
        number = drafts_worth_awaiting(p, min(most, MOST_AWAITED), costs)
        return least if number == 0 and self._is_in_vain(p) else number

    def least_chance(self, num_texts: int) -> float:
        """Return how likely a node must be in this turn of the drafter; 0: it drafts on."""
        return least_chance(num_texts, self._costs) if self.in_turns else 0.0

    def _is_in_vain(self, p: float) -> bool:
        """True if drafts are missing so often that the drafter must be too far away.

        Also true if no wait was made for so long that one is due, to measure it.
        """
        is_forgotten = self._costs.num_skipped >= NUM_SKIPPED_MAX
        return is_forgotten or (1 - p) ** self._num_in_vain < UNLIKELY

    def limit_s(self, wanted: int) -> float:
        """Return how many seconds a wait for `wanted` drafts may take."""
        return wait_limit_s(wanted, self._costs, is_ahead=self._is_ahead(wanted))

    def reason(self, wanted: int, num_texts: int, *, is_late: bool) -> Cause | None:
        """Return why a pass starts with fewer drafts than `wanted`; None: wait on.

        num_texts  number of texts that share the passes
        is_late    True: the deadline has passed
        """
        if self.is_over:
            return Cause.QUIET
        has_begun = self._state is State.WAITING
        if not has_begun and self._is_priced(wanted) and not self._pays(wanted, num_texts):
            return Cause.CHEAP
        return Cause.LATE if is_late else None

    def _is_priced(self, wanted: int) -> bool:
        """True if costs decide whether to wait for so many drafts at all.

        Not for a drafter that waits for every verdict, which drafts nothing meanwhile, and not
        under the classical rules: there a token that the target samples alone has hardly ever been
        drafted.
        """
        is_priced = self._opened.policy.prices_waits and self._opened.rule is Rule.COUPLED
        return is_priced and self._is_ahead(wanted)

    def _is_ahead(self, wanted: int) -> bool:
        """True if the drafter goes on behind `wanted` drafts, also while a pass runs."""
        return self._opened.policy.window > wanted and not self.in_turns

    def _pays(self, wanted: int, num_texts: int) -> bool:
        costs = self._costs
        p = self._acceptance.chance(FIRST_OF_MODEL)
        if costs.wait.num < NUM_FIRST or not costs.pass_s or self._is_in_vain(p):
            return True
        policy = self._opened.policy
        if not verifying_pays(p, wanted, num_texts, costs.passes(num_texts)):
            return False
        if policy.prices_wanted:
            return True  # `num_wanted` has weighed the wait already
        return waiting_pays(p, wanted, policy.num_speculative_tokens, costs)

    def is_unheard(self, said_at: float, now: float) -> bool:
        """True if so much time has passed since `said_at` that the verdict sent then is lost."""
        reply = self._costs.reply
        return now - said_at > (reply.slow_s if reply.num else FIRST_REPLY_S)

    # -- facts ------------------------------------------------------------------------------------

    def began(self) -> None:
        """Note that there was no reason to start a pass: a wait begins or goes on."""
        self._state = State.WAITING

    def went_along(self, now: float) -> None:
        """Note a pass that others have a reason for.

        It cuts the wait short, so it is not measured.
        """
        self._state, self._pass_at = State.BLIND, now

    def started(self, cause: Cause, ready_at: float, now: float) -> None:
        """Note that a pass of this text begins at `now`; it could have begun at `ready_at`."""
        has_waited = self._state is State.WAITING
        self._state, self._pass_at = State.BLIND, now
        if cause is Cause.LATE:
            self._num_late += 1
        elif cause is Cause.CHEAP:
            self._costs.skipped()
            self._num_in_vain += 1
        elif cause is Cause.READY and has_waited:
            # The time after the last draft was spent waiting for other texts.
            self._costs.waited(max(0.0, self._heard_at - ready_at))

    def had_drafts(self) -> None:
        """Note that a pass had drafts of the drafter."""
        self._num_in_vain = 0

    def told(self, root: int, now: float) -> None:
        """Note that a verdict was sent which moves the root to a place without drafts."""
        self._told_at[root] = now
        if len(self._told_at) > MAX_TOLD:
            del self._told_at[next(iter(self._told_at))]

    def heard(self, draft: Draft, now: float, *, first_of_life: bool) -> None:
        """Note a draft, for the measured times; the target's own drafts are ignored."""
        if draft.source in OWN_SOURCES:
            return
        self._num_late = 0
        self._heard_at = now
        if draft.tokens and draft.first_number == draft.number:  # else it is a repetition
            self._costs.draft.add(draft.model_us / 1e6 / max(1, draft.num_steps))
        told_at = self._told_at.pop(draft.parent_hash, None)  # only the first draft is the answer
        if told_at is not None and draft.num_steps and not first_of_life:
            self._answered(told_at + self._later_s(draft), now)

    def _later_s(self, draft: Draft) -> float:
        """Return how long after its first step the drafter sent this: in turns it is held back."""
        if not self.in_turns:
            return 0.0
        return (draft.num_steps - 1) / draft.num_steps * draft.model_us / 1e6

    def _answered(self, told_at: float, now: float) -> None:
        """Measure an answer; while BLIND it may have come any time during the pass."""
        reply, took = self._costs.reply, now - told_at
        if self._state is State.BLIND:
            # Before any answer was measured: a draft step. If the whole pass were taken for the
            # answer, the target would never wait again.
            usual = reply.value if reply.num else self._costs.draft.value
            at_least = max(0.0, self._pass_at - told_at)
            took = min(max(usual, at_least), took)
        reply.add(took)

    def woke(self) -> None:
        """Note that the drafter's rest is over: it has to read first, so it is not waited for."""
        self._num_late = NUM_LATE_UNTIL_QUIET
        self._told_at.clear()
