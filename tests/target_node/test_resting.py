"""The drafter rests where the target is faster alone, and only there."""

from dataclasses import replace

import pytest

from proto.messages import (
    Cause,
    Open,
    Rule,
)
from proto.policies import REST_AFTER
from target_node.events import Compute
from target_node.resting import (
    LONGEST_STRETCH,
    MAX_KINDS,
    SETTLE_DRAFTING,
    SETTLE_RESTING,
    TRIAL_OF_DRAFTS,
    TRIAL_OF_REST,
    Resting,
    kind_of,
)
from tests.drafter_node.drafter import Drafter
from tests.policies import autoregressive, pipelined, synchronous
from tests.target_node.target import Target, said
from tests.texts import opening, verdict

LONG = 20_000  # passes


def run(
    resting: Resting, num_passes: int, *, with_s: float, alone_s: float, catch_up: int = 3
) -> list[bool]:
    """Passes of one token each, which take so long with and without the drafter; when it rested.

    catch_up  passes until it is heard after a rest; until then the target is as slow as alone
    """
    rested, awake = [], catch_up
    for _ in range(num_passes):
        rested.append(resting.now)
        awake = 0 if resting.now else awake + 1
        if awake > catch_up:
            resting.heard()
        resting.passed(1, with_s if awake > catch_up else alone_s)
    return rested


def started(kind: str = "a kind") -> Resting:
    resting = Resting()
    resting.opened(kind, REST_AFTER)
    return resting


def test_it_rests_where_plain_decoding_is_faster() -> None:
    rested = run(started(), LONG, with_s=1.2, alone_s=1.0)
    assert not any(rested[: SETTLE_DRAFTING + REST_AFTER])
    assert sum(rested[: LONG // 10]) > 0.7 * LONG / 10
    assert sum(rested[LONG // 2 :]) > 0.96 * LONG / 2


def test_it_hardly_rests_where_drafts_pay() -> None:
    rested = run(started(), LONG, with_s=0.6, alone_s=1.0)
    assert 0 < sum(rested) < 0.03 * LONG
    assert sum(rested[: LONG // 10]) < 0.1 * LONG / 10


def test_it_does_not_rest_for_what_may_be_chance() -> None:
    rested = run(started(), LONG, with_s=1.04, alone_s=1.0)
    assert sum(rested) < 0.15 * LONG  # trials, which cost nothing
    rested = run(started(), LONG, with_s=1.06, alone_s=1.0)
    assert sum(rested) > 0.9 * LONG


def test_it_notices_that_things_have_changed() -> None:
    resting = started()
    run(resting, LONG, with_s=2.0, alone_s=1.0)
    longest = LONGEST_STRETCH + TRIAL_OF_DRAFTS + 2 * SETTLE_DRAFTING
    run(resting, longest, with_s=0.5, alone_s=1.0)
    rested = run(resting, LONG, with_s=0.5, alone_s=1.0)
    assert sum(rested) < 0.04 * LONG
    run(resting, LONGEST_STRETCH + TRIAL_OF_REST + 2 * SETTLE_DRAFTING, with_s=2.0, alone_s=1.0)
    assert sum(run(resting, LONG, with_s=2.0, alone_s=1.0)) > 0.9 * LONG


@pytest.mark.parametrize("catch_up", [0, 60, 400])
def test_what_it_has_to_read_after_a_rest_does_not_count_against_it(catch_up: int) -> None:
    resting = started()
    run(resting, LONG, with_s=2.0, alone_s=1.0)
    run(resting, LONGEST_STRETCH + catch_up + 100, with_s=0.5, alone_s=1.0, catch_up=catch_up)
    rested = run(resting, LONG, with_s=0.5, alone_s=1.0, catch_up=catch_up)
    assert sum(rested) < 0.04 * LONG


def test_a_trial_of_drafts_ends_also_if_none_comes() -> None:
    resting = started()
    run(resting, LONG, with_s=2.0, alone_s=1.0)
    rested = run(resting, LONG, with_s=0.5, alone_s=1.0, catch_up=LONG)
    assert any(rested[LONG // 2 :])
    assert not all(rested[LONG // 2 :])


def test_the_first_passes_of_a_stretch_do_not_count() -> None:
    resting = started()
    run(resting, SETTLE_DRAFTING + REST_AFTER, with_s=1.0, alone_s=1.0)
    assert resting.now
    for number in range(SETTLE_RESTING + TRIAL_OF_REST):
        resting.passed(1, 100.0 if number < SETTLE_RESTING else 0.5)
    assert resting.now  # they took ages, but what came then was twice as fast


def test_each_kind_of_text_has_its_own_course() -> None:
    resting = started("slow with drafts")
    run(resting, LONG, with_s=2.0, alone_s=1.0)
    assert resting.now
    resting.opened("fast with drafts", REST_AFTER)
    assert not resting.now
    resting.opened(None, REST_AFTER)
    assert not any(run(resting, LONG, with_s=2.0, alone_s=1.0))
    resting.opened("slow with drafts", REST_AFTER)
    assert resting.now
    for number in range(MAX_KINDS):
        resting.opened(number, REST_AFTER)
    resting.opened("slow with drafts", REST_AFTER)
    assert not resting.now  # forgotten


def test_only_free_running_coupled_texts_have_a_kind() -> None:
    def kind(message: Open) -> object:
        return kind_of(message)

    free = opening(1, 2, policy=pipelined(8, 16))
    assert kind(free) is not None
    assert kind(free) == kind(opening(7, 8, 9, policy=pipelined(8, 16), session=2))
    assert kind(free) != kind(opening(1, 2, policy=pipelined(4, 16)))
    hot = replace(free, sampling=replace(free.sampling, temperature=0.8))
    assert kind(free) != kind(hot)
    for policy in (synchronous(4), autoregressive(), pipelined(8, 16, rest_after=0)):
        assert kind(opening(1, 2, policy=policy)) is None
    assert kind(replace(free, rule=Rule.BLOCK)) is None


def test_a_target_that_is_faster_alone_says_so_and_does_not_wait() -> None:
    target = Target()
    limits = replace(opening(1, 2).limits, max_len=2000)
    target.hears(opening(1, 2, policy=pipelined(8, 16), limits=limits))
    causes: list[Cause] = []
    for token in range(600):
        (compute,) = target.ticks()
        assert isinstance(compute, Compute)
        # Every pass takes a second; with drafts, of which none is right, two.
        is_free = target.machine._resting.now
        causes.append(
            said(target.computes(compute.ticket, 3 + token % 90, pass_s=2.0 - is_free)).cause
        )
        assert causes[-1] in (Cause.QUIET, Cause.RESTING, Cause.ALONE)
    assert causes.count(Cause.RESTING) > REST_AFTER
    assert Cause.RESTING not in causes[:REST_AFTER]


def test_a_drafter_rests_while_verdicts_say_so() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=pipelined(8, 16)))
    drafter.drafts(3)
    drafter.hears(verdict((1, 2), 3, cause=Cause.RESTING))
    assert drafter.ticks() == []
    drafter.hears(verdict((1, 2, 3), 4, cause=Cause.RESTING))
    assert drafter.ticks() == []
    drafter.hears(verdict((1, 2, 3, 4), 5, cause=Cause.QUIET))
    assert drafter.ticks()


def test_a_prefill_has_its_own_price_and_does_not_count() -> None:
    target = Target()
    target.hears(opening(*range(1, 21), policy=pipelined(8, 16)))
    target.ticks()
    target.computes(1, 3, pass_s=100.0)
    course = target.machine._resting._course
    assert course is not None
    assert course.num_passes == 0
    target.ticks()
    target.computes(2, 4, pass_s=1.0)
    assert course.num_passes == 1


def test_a_text_of_a_kind_that_rests_begins_with_a_rest() -> None:
    target = Target()
    first = opening(*range(1, 21), policy=pipelined(8, 16))
    resting = target.machine._resting
    resting.opened(kind_of(first), REST_AFTER)
    run(resting, LONG, with_s=2.0, alone_s=1.0)
    assert resting.now
    target.hears(first)
    target.ticks()
    assert said(target.computes(1, 3)).cause is Cause.RESTING
