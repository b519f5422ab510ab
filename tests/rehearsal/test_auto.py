"""What `auto` chooses by price, against the best of fixed numbers, on costs that differ widely."""

import pytest

from proto.policies import POLICIES, PolicyName
from rehearsal.acceptance import chances, drawn
from rehearsal.planning import rehearse
from rehearsal.setting import Forwards, NodeCosts

STEP_S = 0.002
LAUNCHES = (1, 2, 4, 6)  # drafts in a row that start a pass
NUM_TOKENS = 200


@pytest.mark.parametrize(
    ("steps", "acceptance", "row"),
    [
        (4, "0.6", 0.0),
        (15, "0.8", 0.0),
        (70, "0.6", 0.0),
        (15, "0.7", 0.08),
        (40, "0.7", 0.08),
    ],
)
def test_it_is_near_the_best_fixed_number_of_drafts_to_wait_for(
    steps: int, acceptance: str, row: float
) -> None:
    """A pass takes so many draft steps, and each further row a share of a pass."""
    trace, pass_s = drawn(chances(acceptance), 1, NUM_TOKENS), steps * STEP_S
    target = NodeCosts(Forwards(((1, pass_s),), row * pass_s), 1e-4, timed_rows=(1, 2, 3, 5, 9))
    drafter = NodeCosts(Forwards(((1, STEP_S),)), 5e-5, 1e-4, timed_rows=(1, 2, 4, 8))

    def speed(name: PolicyName, k: int = 8, **options: float) -> float:
        policy = POLICIES[name].make(k, 32, options=options)
        return rehearse(policy, target, drafter, trace).tokens_per_second

    fixed = [speed("tree", launch_min=m, launch_hit=m) for m in LAUNCHES]
    fixed += [speed("ssd", 4), speed("pipelined", 4)]
    assert max(fixed) > 1.3 * speed("ar")
    assert speed("auto") > 0.93 * max(fixed)
