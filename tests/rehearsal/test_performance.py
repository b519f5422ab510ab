"""What a rehearsal says of its devices, against numbers that can be counted by hand."""

import pytest

from proto.policies import POLICIES, TABLE
from rehearsal.acceptance import chances, drawn
from rehearsal.planning import Figures, rehearse
from rehearsal.setting import Forwards, NodeCosts

PASS_S, STEP_S = 0.030, 0.002


def rehearsed(policy: str, k: int, window: int, step_s: float = STEP_S) -> Figures:
    return rehearse(
        POLICIES[policy].make(k, window),
        NodeCosts(Forwards(((1, PASS_S),))),
        NodeCosts(Forwards(((1, step_s),))),
        drawn(chances("0.75"), 1, 160),
    )


def test_every_step_of_a_chain_is_work_of_the_drafter() -> None:
    k = 6
    busy = rehearsed("sync", k, k).drafter_busy
    assert busy == pytest.approx(k * STEP_S / (PASS_S + k * STEP_S), rel=0.05)


def test_a_drafter_that_always_runs_ahead_is_busy_most_of_the_time() -> None:
    assert rehearsed("pearl", 6, 16).drafter_busy > 0.5


@pytest.mark.parametrize("policy", [row.name for row in TABLE if row.drafts])
def test_no_device_is_busy_for_longer_than_the_texts_took(policy: str) -> None:
    for step_s in (STEP_S, PASS_S, 3 * PASS_S):
        figures = rehearsed(policy, 4, 16, step_s)
        assert 0 < figures.target_busy <= 1
        assert 0 < figures.drafter_busy <= 1
