"""How soon after the last fault a text goes on, and how soon drafts are accepted again.

The bad time is over when everything that it did has shown itself: no node is down or not yet told,
no message of it is still on its way, and no `Open` is still to come. While the drafter is told to
rest nobody expects drafts, so that counts as a part of it. Then, until the text ends:

    completed   the text is complete within SETTLE_S, its prefills, and for every token left what
                one costs at worst;
    accepted    with a drafter that is always right, drafts are accepted again within three
                verdicts, and within NOTICE_S (heartbeats must tell what was lost), the prefills and
                ACCEPT_TOKENS such token costs. Where a message takes longer than a pass, there are
                verdicts that nobody could have answered yet, so a chain of causes is counted: a
                pass has *depth* n if a draft has come that was sent after a verdict of depth n, and
                its verdict has depth n + 1. No pass of depth three goes without an accepted draft,
                unless one before it had some.

The second holds for a drafter that can keep up: it is faster than the target, and waits for every
verdict (`sync`) or has a window of more passes than a round trip takes. A drafter with a smaller
window is always behind a target that goes on alone, and then going on alone is faster.
"""

from collections import Counter
from typing import TYPE_CHECKING

from coordinator.text.session import ANSWER_LIMIT_S, WORK_LIMIT_S_MIN, Session
from proto.liveness import HEARTBEAT_INTERVAL_S
from proto.messages import Cause, Draft, Limits, Rule, Verdict
from tests.simulation.scenario import Scenario

if TYPE_CHECKING:
    from rehearsal.timeline import Timeline

NUM_VERDICTS = 3
SETTLE_S = WORK_LIMIT_S_MIN  # heartbeats tell everything before that last resort does
NOTICE_S = ANSWER_LIMIT_S + 2 * HEARTBEAT_INTERVAL_S
ACCEPT_TOKENS = 5
NUM_ATTEMPT_TRIPS = 2  # a drafter must hear of a new attempt before it drafts for it


class Liveness:
    """The part of the judge that looks at the time after the last fault, for one text.

    end_len  tokens that the text will have
    """

    def __init__(
        self,
        scenario: Scenario,
        timeline: "Timeline",
        stats: Counter[str],
        session: Session,
        end_len: int,
    ) -> None:
        self.scenario = scenario
        self.timeline = timeline
        self.healed_at = scenario.healed_at_s
        self.stats = stats
        self.session: Session | None = session  # None: the text is complete
        self.end_len = end_len
        self.complete_by: float | None = None  # None: the bad time is not over
        self._forget()

    def _forget(self) -> None:
        """Begin to count verdicts."""
        self.disturbed_at = self.timeline.now
        self.is_accepted = False
        self._issued: dict[tuple[int, int], int] = {}  # verdict (its life and base) -> depth
        self._drafter_depths: Counter[str] = Counter()  # by drafter
        self._sent: dict[tuple[int, int], int] = {}  # draft (its life and number) -> depth
        self._target_depth = 0
        self._running_depth = 0  # of the running pass
        self._pass_depth = 0  # of the pass that has ended last

    # -- facts ------------------------------------------------------------------------------------

    def completed(self) -> None:
        """The text has come to its end."""
        self.session = None
        self.stats["texts"] += 1

    def disturbed(self) -> None:
        """The bad time has just shown itself, or a node is told the text."""
        self._forget()

    def draft_sent(self, drafter: str, draft: Draft) -> None:
        """A drafter sends."""
        self._sent[draft.incarnation, draft.number] = self._drafter_depths[drafter]

    def draft_arrived(self, draft: Draft) -> None:
        """The target has it."""
        depth = self._sent.get((draft.incarnation, draft.number), 0)
        self._target_depth = max(self._target_depth, depth)

    def pass_started(self) -> None:
        """The target begins."""
        self._running_depth = self._target_depth

    def pass_ended(self) -> None:
        """It has what there is to say; the next one may begin before it is said."""
        self._pass_depth = self._running_depth

    def verdict_issued(self, verdict: Verdict, limits: Limits) -> None:
        """The target has spoken."""
        if verdict.cause is Cause.RESTING and not self.is_accepted:
            self._forget()
            return
        self._issued[verdict.incarnation, verdict.base_len] = self._pass_depth + 1
        has_room = limits.max_drafts(verdict.base_len) > 0
        if self.is_accepted or not has_room or not self._is_acceptance_due():
            return
        if self.session is None:
            return  # it comes too late for anybody
        if verdict.num_accepted:
            self.is_accepted = True
            self.stats["accepted again"] += 1
            self.stats[f"accepted at depth {self._pass_depth}"] += 1
            return
        depth = self._pass_depth
        assert depth < NUM_VERDICTS, f"no draft is accepted in a pass of depth {depth}"

    def verdict_applied(self, drafter: str, verdict: Verdict) -> None:
        """A drafter has heard it."""
        depth = self._issued.get((verdict.incarnation, verdict.base_len), 0)
        self._drafter_depths[drafter] = max(self._drafter_depths[drafter], depth)

    # -- time -------------------------------------------------------------------------------------

    def watch_clock(self) -> None:
        """Nothing may take longer than it has to."""
        now, session = self.timeline.now, self.session
        if session is None or now < self.healed_at:
            return
        costs = self.scenario
        num_left = self.end_len - len(session.text)
        if self.complete_by is None:
            prefills_s = costs.prefill_s(self.end_len)
            self.complete_by = now + SETTLE_S + prefills_s + num_left * costs.token_s
            self.stats["outlived the bad time"] += 1
        assert now < self.complete_by, f"{num_left} tokens are still missing"
        if self.is_accepted or num_left < 2 or not self._is_acceptance_due():
            return
        accept_s = NOTICE_S + costs.prefill_s(self.end_len) + ACCEPT_TOKENS * costs.token_s
        if costs.rule is not Rule.COUPLED:
            accept_s += NUM_ATTEMPT_TRIPS * costs.round_trip_s
        assert now < self.disturbed_at + accept_s, f"no draft is accepted in {accept_s:.2f} s"

    def _is_acceptance_due(self) -> bool:
        scenario = self.scenario
        is_over = self.timeline.now >= self.healed_at
        return is_over and scenario.is_oracle and scenario.can_keep_up
