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

    fixed = [speed("tree", launch_min=m, launch_accepted=m) for m in LAUNCHES]
    fixed += [speed("ssd", 4), speed("pipelined", 4)]
    assert max(fixed) > 1.3 * speed("ar")
    assert speed("auto") > 0.93 * max(fixed)


@pytest.mark.parametrize(("steps", "tokens"), [(6.1, 2.5), (5.1, 2.35), (12.1, 2.8)])
def test_it_is_near_what_a_tree_could_make_at_best(steps: float, tokens: float) -> None:
    """Without hop or host, best first with eight nodes a step: 2.6, 2.5 and 3.0 at 6, 5 and 12."""
    trace, pass_s = drawn((0.70, 0.12, 0.05, 0.03), 2, 400), steps * STEP_S
    target, drafter = NodeCosts(Forwards(((1, pass_s),))), NodeCosts(Forwards(((1, STEP_S),)))
    made = rehearse(POLICIES["auto"].make(), target, drafter, trace).tokens_per_second * pass_s
    assert made > tokens


@pytest.mark.parametrize(("acceptance", "least"), [("0.6", 0.985), ("0.95", 1.1)])
def test_where_rows_are_dear_it_is_hardly_slower_than_plain_decoding(
    acceptance: str, least: float
) -> None:
    """A pass of two or more rows takes as long as five of one; only long runs of drafts pay."""
    trace, pass_s = drawn(chances(acceptance), 1, 500), 0.005
    passes = Forwards(((1, pass_s), (2, 5 * pass_s)))
    target = NodeCosts(passes, 3e-4, timed_rows=(1, 2, 3, 5, 9))
    drafter = NodeCosts(Forwards(((1, 0.001),)), 2e-4, 5e-5, timed_rows=(1, 2, 4, 8))
    auto, plain = (
        rehearse(POLICIES[name].make(), target, drafter, trace, is_whole=True).tokens_per_second
        for name in ("auto", "ar")
    )
    assert auto > least * plain


def test_a_long_step_is_not_made_where_it_would_only_delay_the_answer() -> None:
    """A pass takes three steps, half of the first drafts are right, and `tree` waits for two."""
    trace = drawn((0.5, 0.1, 0.05, 0.03), 2, 400)
    target, drafter = NodeCosts(Forwards(((1, 0.013),))), NodeCosts(Forwards(((1, 0.004),)))

    def speed(**options: float) -> float:
        policy = POLICIES["tree"].make(options=options)
        return rehearse(policy, target, drafter, trace).tokens_per_second

    assert speed() > 1.05 * speed(min_score=-9.0)
