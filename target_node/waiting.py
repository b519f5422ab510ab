"""Measures how long one text waits for its drafter's answers (pure). `deciding.py` decides.

A verdict moves the root (the last committed token). If no draft hangs there yet, the first draft
that does is the drafter's answer to this verdict, even if it arrives when the root has moved on. So
the time of an answer is also measured where the target did not wait: otherwise a drafter that needs
longer than one pass would always come too late, and it would never be known how late. A draft that
has arrived during a pass is received when the pass ends, so that only an upper limit of its time is
known. The first draft of a life answers an `Open`, with all its prefill, and is not measured.

    began                 there is no reason to start a pass        -> WAITING
    started, went_along   a pass with this text begins              -> BLIND, until the next `began`
    left_out              a pass without it begins                  -> BLIND, if it was WAITING

A drafter that is silent is not waited for. But it may be silent because nobody waits: where both
models take turns on a device, it gets one step for each pass, and so never gets ahead of the text.
So it is waited for after QUIET_FIRST passes, then after twice as many, and so on.

A life begins FRESH. While BLIND, perhaps no messages have been received since the pass began. That
is so if the host itself computes; there it costs up to 13 % to mistake the pass for the time of an
answer (docs/LOG.md). If messages are received during a forward, BLIND makes no measurable
difference.
"""

from enum import Enum, auto

from node.costs import Costs
from proto.messages import OWN_SOURCES, Cause, Draft

NUM_LATE_UNTIL_QUIET = 2  # missed deadlines in a row after which the drafter counts as silent
# A silent drafter is waited for once after so many passes, then after twice as many, to the most.
QUIET_FIRST, QUIET_MOST = 4, 256
FIRST_REPLY_S = 0.5  # assumed limit of an answer as long as none was measured
MAX_TOLD = 64


class State(Enum):
    """Where a text is: before its first wait or pass, waiting for drafts, or after a pass."""

    FRESH = auto()
    WAITING = auto()
    BLIND = auto()


class Waiting:
    """Measures the waits of one text, for one life of it.

    num_in_vain  passes that began without waiting since one had drafts
    was_try      the last pass has waited in vain for a silent drafter
    """

    def __init__(self, costs: Costs) -> None:
        self.was_try = False
        self.num_in_vain = 0
        self._costs = costs
        # Before its first draft a drafter counts as silent, so that the first token does not wait.
        self._num_late = NUM_LATE_UNTIL_QUIET  # waits in a row that have passed their deadline
        self._num_quiet, self._patience = 0, QUIET_FIRST  # passes of its silence, and the most
        self._told_at: dict[int, float] = {}  # root -> when its verdict was sent; the newest ones
        self._state = State.FRESH
        self._is_cut = False  # a pass without this text has run while it waited
        self._pass_at = 0.0  # when the last pass began
        self._heard_at = 0.0  # when the last draft arrived

    # -- questions --------------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """True if the drafter was not heard since a life, a rest or missed deadlines began.

        False if it is to be tried again.
        """
        return self._num_late >= NUM_LATE_UNTIL_QUIET and self._num_quiet < self._patience

    @property
    def has_begun(self) -> bool:
        """True if the text waits for drafts."""
        return self._state is State.WAITING

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
        self._state, self._pass_at, self._is_cut = State.BLIND, now, False
        self.was_try = False

    def left_out(self, now: float) -> None:
        """Note a pass of others: what arrives while it runs may be heard only when it ends.

        So a wait that it has cut is not measured.
        """
        if self._state is State.WAITING:
            self._state, self._pass_at, self._is_cut = State.BLIND, now, True

    def started(self, cause: Cause, ready_at: float, now: float) -> None:
        """Note that a pass of this text begins at `now`; it could have begun at `ready_at`."""
        has_waited = self._state is State.WAITING and not self._is_cut
        self._state, self._pass_at, self._is_cut = State.BLIND, now, False
        self.was_try = cause is Cause.LATE and self._num_quiet > 0
        if cause is Cause.QUIET:
            self._num_quiet += 1
        elif cause is Cause.LATE:
            self._num_late += 1
            if self.was_try:
                self._num_quiet, self._patience = 0, min(QUIET_MOST, 2 * self._patience)
        elif cause is Cause.CHEAP:
            self._costs.skipped()
            self.num_in_vain += 1
        elif cause is Cause.READY and has_waited:
            # The time after the last draft was spent waiting for other texts.
            self._costs.waited(max(0.0, self._heard_at - ready_at))

    def had_drafts(self) -> None:
        """Note that a pass had drafts of the drafter."""
        self.num_in_vain = 0

    def told(self, root: int, now: float) -> None:
        """Note that a verdict moves the root to a place without drafts; it is sent right after."""
        self._told_at[root] = now
        if len(self._told_at) > MAX_TOLD:
            del self._told_at[next(iter(self._told_at))]

    def heard(
        self, draft: Draft, now: float, *, first_of_life: bool, in_turns: bool = False
    ) -> None:
        """Note a draft, for the measured times; the target's own drafts are ignored.

        in_turns  True: the drafter drafts nothing during passes, and sends all drafts at once
        """
        if draft.source in OWN_SOURCES:
            return
        self._num_late = self._num_quiet = 0
        self._patience = QUIET_FIRST
        self._heard_at = now
        if draft.num_steps:  # else it says again what was said, or what was held back
            self._costs.draft.add(draft.model_us / 1e6 / draft.num_steps)
        told_at = self._told_at.pop(draft.parent_hash, None)  # only the first draft is the answer
        if told_at is not None and draft.num_steps and not first_of_life:
            self._answered(told_at + (_later_s(draft) if in_turns else 0.0), now)

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


def _later_s(draft: Draft) -> float:
    """Return how long after its first step a drafter sent this that has held it back."""
    return (draft.num_steps - 1) / draft.num_steps * draft.model_us / 1e6
