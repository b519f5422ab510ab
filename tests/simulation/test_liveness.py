"""The judge of liveness: when a drafter that is always right must be believed again."""

from collections import Counter
from itertools import count
from typing import TYPE_CHECKING, cast

import pytest

from coordinator.text.session import Session
from proto.messages import Cause
from tests.simulation.liveness import NUM_VERDICTS, Liveness
from tests.simulation.scenario import Scenario, draw
from tests.texts import LIMITS, draft, verdict

if TYPE_CHECKING:
    from rehearsal.timeline import Timeline


class Healed:
    """A timeline long after the last fault."""

    now = 1e9


def healthy() -> Scenario:
    """One whose drafter is always right and can keep up."""
    return next(one for one in map(draw, count()) if one.is_oracle and one.can_keep_up)


def rounds(cause: Cause, num_rounds: int) -> Liveness:
    """Rounds in which every verdict is answered by a draft, none of which is accepted."""
    text = list(range(8))
    timeline = cast("Timeline", Healed())
    judge = Liveness(healthy(), timeline, Counter(), cast(Session, object()), 1000)
    for number in range(1, num_rounds + 1):
        judge.pass_started()
        judge.pass_ended()
        said = verdict(text, 1, cause=cause)
        judge.verdict_issued(said, LIMITS)
        judge.verdict_applied("drafter", said)
        answer = draft(text, 2, number=number)
        judge.draft_sent("drafter", answer)
        judge.draft_arrived(answer)
        text.append(1)
    return judge


def test_drafts_that_answer_verdicts_are_accepted_in_time() -> None:
    rounds(Cause.READY, NUM_VERDICTS)
    with pytest.raises(AssertionError, match="no draft is accepted in a pass of depth"):
        rounds(Cause.READY, NUM_VERDICTS + 1)


def test_a_rest_counts_neither_for_nor_against_the_drafter() -> None:
    assert not rounds(Cause.RESTING, 4 * NUM_VERDICTS).is_accepted
