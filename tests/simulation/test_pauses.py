"""No pause is longer than ten round trips where one message in fifty is lost."""

from collections import Counter

import pytest

from proto.policies import TABLE
from tests.simulation.pauses import MOST_S, Run, draw

# Each had a longer one: a lost verdict that a text waited for, an Open whose loss was found late,
# a heartbeat that an Open had overtaken.
ONCE_LONGER = (8, 9, 10, 16, 88)


@pytest.mark.parametrize("seed", ONCE_LONGER)
def test_what_was_once_a_long_pause_is_none(seed: int) -> None:
    run = Run(draw(seed))
    assert run.run().seconds <= MOST_S
    assert run.num_accepted


@pytest.mark.long
def test_no_seed_has_a_long_pause_and_drafts_are_accepted_under_every_policy() -> None:
    # Of a drafter so far away, a policy that hardly waits may have no draft in time in one run.
    num_accepted: Counter[str] = Counter()
    for seed in range(48):
        run = Run(draw(seed))
        assert run.run().seconds <= MOST_S, f"seed {seed}"
        num_accepted[run.case.setting.policy.name] += run.num_accepted
    assert all(num_accepted[row.name] > 10 for row in TABLE if row.drafts)
