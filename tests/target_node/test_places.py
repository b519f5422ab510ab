"""On which cores a target's passes run, and what is noted of them."""

from collections.abc import Sequence

import pytest

from node.placing import Place, Placing
from proto.messages import Limits
from target_node.compute import Action, Compute, Outcome
from tests.policies import autoregressive
from tests.target_node.target import Target
from tests.texts import PIPELINED, STOP, opening

APART, SHARED = Place.APART, Place.SHARED
TOKEN = 1  # does not end the text
LONG = Limits(max_len=900, stop_ids=(STOP,))


def compute_of(actions: Sequence[Action]) -> Compute:
    """The pass that starts."""
    (compute,) = (action for action in actions if isinstance(action, Compute))
    return compute


def written(target: Target, num_passes: int, seconds: dict[Place, float]) -> list[Place]:
    """Let a text without drafts go on; where each of its passes ran."""
    found = []
    for _ in range(num_passes):
        compute = compute_of(target.ticks())
        found.append(compute.place)
        target.answers(compute.ticket, Outcome((TOKEN,)), pass_s=seconds[compute.place])
    return found


@pytest.mark.parametrize("faster", list(Place))
def test_a_text_without_drafts_goes_on_where_it_is_faster(faster: Place) -> None:
    target = Target(placing=Placing())
    target.hears(opening(1, 2, policy=autoregressive(), limits=LONG))
    places = written(target, 200, {faster: 0.030, faster.other: 0.050})
    assert places[0] is SHARED, "all cores, as nothing is known"
    assert places[-100:].count(faster) > 85
    costs = target.known.costs
    assert costs.passes(1, faster).of(1) == pytest.approx(0.030)
    assert costs.passes(1, faster.other).of(1) == pytest.approx(0.050)


def test_where_other_work_slows_the_passes_they_move_in_mid_text() -> None:
    target = Target(placing=Placing())
    target.hears(opening(1, 2, policy=autoregressive(), limits=LONG))
    written(target, 200, {APART: 0.050, SHARED: 0.030})
    places = written(target, 200, {APART: 0.050, SHARED: 0.500})
    assert places[-100:].count(APART) > 90


def test_a_drafter_keeps_its_core_where_the_user_says_so() -> None:
    target = Target(placing=Placing(fixed=APART))
    target.hears(opening(1, 2, policy=PIPELINED, limits=LONG))
    assert compute_of(target.ticks()).place is APART


def test_without_a_choice_passes_stay() -> None:
    target = Target()
    target.hears(opening(1, 2, policy=autoregressive(), limits=LONG))
    assert set(written(target, 50, {APART: 0.050, SHARED: 0.030})) == {APART}


def test_plain_decoding_is_known_where_it_is_fastest_also_while_passes_run_elsewhere() -> None:
    target = Target(placing=Placing(fixed=APART))
    target.hears(opening(1, 2, policy=autoregressive(), limits=LONG))
    written(target, 200, {APART: 0.050, SHARED: 0.030})
    assert target.known.costs.passes(1, APART).of(1) == pytest.approx(0.050)
    assert target.known.plain_s(1) == pytest.approx(0.030)


def test_without_a_choice_plain_decoding_is_known_where_passes_run() -> None:
    target = Target()
    target.hears(opening(1, 2, policy=autoregressive(), limits=LONG))
    written(target, 50, {APART: 0.050, SHARED: 0.030})
    assert target.known.plain_s(1) == pytest.approx(0.050)
