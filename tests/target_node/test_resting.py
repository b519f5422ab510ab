"""The drafter rests where the target is faster alone, and only there."""

from dataclasses import replace

import pytest

from drafter_node.compute import Compute
from node.events import Send, WaitUntil
from proto.messages import Cause, Rule
from proto.policies import REST_AFTER
from target_node.resting import (
    LONGEST_STRETCH,
    MAX_KINDS,
    NUM_IN_CROWD,
    NUM_TO_SUSPECT,
    SETTLE_DRAFTING,
    SETTLE_IN_CROWD,
    SETTLE_RESTING,
    SPENT,
    SURELY,
    TRIAL_OF_DRAFTS,
    TRIAL_OF_REST,
    Course,
    Courses,
    Outcome,
)
from tests.drafter_node.drafter import Drafter
from tests.policies import autoregressive, pipelined, synchronous
from tests.target_node.target import Target, part_of, said
from tests.texts import PIPELINED, draft, opening, verdict

LONG = 20_000  # passes


def run(
    course: Course,
    num_passes: int,
    *,
    with_s: float,
    alone_s: float,
    catch_up: int = 3,
    plain_s: float = 0.0,
) -> list[bool]:
    """Passes of one token each, which take so long with and without the drafter; when it rested.

    catch_up  passes until it is heard after a rest; until then the target is as slow as alone
    plain_s   what a pass alone is thought to take; 0: nobody knows
    """
    rested, awake = [], catch_up
    for _ in range(num_passes):
        rested.append(course.rests)
        awake = 0 if course.rests else awake + 1
        if awake > catch_up:
            course.heard()
        course.passed(1, with_s if awake > catch_up else alone_s, plain_s)
    return rested


def started() -> Course:
    return Course(REST_AFTER, REST_AFTER)


def test_it_rests_where_plain_decoding_is_faster() -> None:
    rested = run(started(), LONG, with_s=1.2, alone_s=1.0)
    assert not any(rested[: SETTLE_DRAFTING + REST_AFTER])
    assert sum(rested[: LONG // 10]) > 0.7 * LONG / 10
    assert sum(rested[LONG // 2 :]) > 0.96 * LONG / 2


def test_the_first_trial_comes_early_where_drafts_bring_less_than_is_known_of_none() -> None:
    early = SETTLE_DRAFTING + NUM_TO_SUSPECT
    rested = run(started(), LONG, with_s=1.2, alone_s=1.0, plain_s=1.0)
    assert rested.index(True) == early
    assert sum(rested[:REST_AFTER]) > 0.7 * (REST_AFTER - early)
    # What was timed at load may have been too low: a trial that does not confirm it is the last.
    rested = run(started(), LONG, with_s=0.6, alone_s=1.0, plain_s=0.5)
    assert rested.index(True) == early
    assert not any(rested[early + SETTLE_RESTING + TRIAL_OF_REST + 1 :][:REST_AFTER])
    assert sum(rested) < 0.03 * LONG
    rested = run(started(), LONG, with_s=0.9, alone_s=1.0, plain_s=1.0)
    assert rested.index(True) == SETTLE_DRAFTING + REST_AFTER


def test_it_tries_no_rest_for_long_where_drafts_bring_far_more_than_is_known_of_none() -> None:
    rested = run(started(), LONG, with_s=0.6, alone_s=1.0, plain_s=1.0)
    assert rested.index(True) > 2 * LONGEST_STRETCH - REST_AFTER
    assert 0 < sum(rested) < 0.01 * LONG
    # What was timed at load may have been too high: then the first trial tells.
    rested = run(started(), LONG, with_s=1.2, alone_s=1.0, plain_s=2.0)
    first = rested.index(True)
    assert first < 2 * LONGEST_STRETCH + 10 * SETTLE_DRAFTING
    assert sum(rested[first:]) > 0.9 * (LONG - first)
    # And once there was one, trials decide, also where they find both alike.
    rested = run(started(), LONG, with_s=1.0, alone_s=1.0, plain_s=2.0)
    assert sum(rested[rested.index(True) :]) > 0.05 * LONG


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
    course = started()
    run(course, LONG, with_s=2.0, alone_s=1.0)
    longest = LONGEST_STRETCH + TRIAL_OF_DRAFTS + 2 * SETTLE_DRAFTING
    run(course, longest, with_s=0.5, alone_s=1.0)
    rested = run(course, LONG, with_s=0.5, alone_s=1.0)
    assert sum(rested) < 0.04 * LONG
    run(course, LONGEST_STRETCH + TRIAL_OF_REST + 2 * SETTLE_DRAFTING, with_s=2.0, alone_s=1.0)
    assert sum(run(course, LONG, with_s=2.0, alone_s=1.0)) > 0.9 * LONG


def test_a_trial_of_drafts_that_are_far_slower_is_cut_short() -> None:
    def num_tried(with_s: float) -> int:
        """Passes with drafts in a trial after a long rest."""
        course = started()
        rested = run(course, LONG, with_s=with_s, alone_s=1.0, catch_up=0)
        last_rest = len(rested) - 1 - rested[::-1].index(True)
        rested = rested[:last_rest]
        end = len(rested) - rested[::-1].index(False)
        return rested[:end][::-1].index(True)

    assert num_tried(1.3) == SETTLE_DRAFTING + NUM_TO_SUSPECT
    assert num_tried(1.2) == SETTLE_DRAFTING + TRIAL_OF_DRAFTS


@pytest.mark.parametrize("with_s", [1.2, 1.5, 3.0])
def test_trials_of_drafts_cost_little_of_the_time(with_s: float) -> None:
    course = started()
    run(course, LONG, with_s=with_s, alone_s=1.0)
    rested = run(course, 5 * LONG, with_s=with_s, alone_s=1.0)
    num_tried = len(rested) - sum(rested)
    assert 0 < num_tried * (with_s - 1.0) < 1.2 * SPENT * len(rested)


def test_so_do_those_in_a_crowd() -> None:
    crowd = Course(REST_AFTER, REST_AFTER, is_crowd=True)
    run(crowd, LONG, with_s=0.5, alone_s=1.0)
    num_tried = sum(run(crowd, 5 * LONG, with_s=0.5, alone_s=1.0))
    assert 0 < num_tried * 0.5 < 1.2 * SPENT * 5 * LONG


def test_trials_of_a_rest_do_so_too() -> None:
    course = started()
    run(course, LONG, with_s=0.5, alone_s=1.0)
    num_tried = sum(run(course, 5 * LONG, with_s=0.5, alone_s=1.0))
    assert 0 < num_tried * 0.5 < 1.2 * SPENT * 5 * LONG


def test_a_text_on_which_drafts_are_far_worse_than_on_others_ends_without_them() -> None:
    course = started()
    run(course, LONG, with_s=0.5, alone_s=1.0)
    assert True in course.rates
    run(course, 200, with_s=0.5, alone_s=1.0)
    rested = run(course, 300, with_s=1.1 * SURELY, alone_s=1.0)
    assert rested.index(True) < 4 * NUM_TO_SUSPECT
    assert sum(rested) > 200
    assert course.pass_s[False] == pytest.approx(1.1 * SURELY)
    outcome = course.outcome("kind", 1)
    assert outcome is not None
    later = Course.resumed(outcome._replace(rests=False, num_passes=outcome.stretch), REST_AFTER)
    rested = run(later, 300, with_s=1.1 * SURELY, alone_s=1.0, catch_up=0)
    assert rested.index(True) >= NUM_TO_SUSPECT, "a pass or two of a new process prove nothing"
    assert later.pass_s[False] == pytest.approx(1.1 * SURELY)
    rested = run(started(), 300, with_s=0.9 * SURELY, alone_s=1.0)
    assert rested.index(True) == SETTLE_DRAFTING + REST_AFTER, "nothing was tried yet"


def test_far_slower_drafts_are_doubted_at_once() -> None:
    rested = run(started(), LONG, with_s=1.1 * SURELY, alone_s=1.0, plain_s=1.0)
    assert rested.index(True) == SETTLE_DRAFTING + NUM_IN_CROWD
    rested = run(started(), LONG, with_s=0.9 * SURELY, alone_s=1.0, plain_s=1.0)
    assert rested.index(True) == SETTLE_DRAFTING + NUM_TO_SUSPECT


@pytest.mark.parametrize("catch_up", [0, 60, 400])
def test_what_it_has_to_read_after_a_rest_does_not_count_against_it(catch_up: int) -> None:
    course = started()
    run(course, LONG, with_s=2.0, alone_s=1.0)
    run(course, LONGEST_STRETCH + catch_up + 100, with_s=0.5, alone_s=1.0, catch_up=catch_up)
    rested = run(course, LONG, with_s=0.5, alone_s=1.0, catch_up=catch_up)
    assert sum(rested) < 0.04 * LONG


def test_a_trial_of_drafts_ends_also_if_none_comes() -> None:
    course = started()
    run(course, LONG, with_s=2.0, alone_s=1.0)
    rested = run(course, LONG, with_s=0.5, alone_s=1.0, catch_up=LONG)
    assert any(rested[LONG // 2 :])
    assert not all(rested[LONG // 2 :])


def test_the_first_passes_of_a_stretch_do_not_count() -> None:
    course = started()
    run(course, SETTLE_DRAFTING + REST_AFTER, with_s=1.0, alone_s=1.0)
    assert course.rests
    for number in range(SETTLE_RESTING + TRIAL_OF_REST):
        course.passed(1, 100.0 if number < SETTLE_RESTING else 0.5)
    assert course.rests  # they took ages, but what came then was twice as fast


FREE = opening(1, 2, policy=pipelined(8, 16))


def test_each_kind_of_text_has_its_own_course() -> None:
    courses = Courses()
    slow = courses.of(FREE, 1)
    assert slow is not None
    run(slow, LONG, with_s=2.0, alone_s=1.0)
    assert slow.rests
    assert courses.of(opening(7, 8, 9, policy=pipelined(8, 16), session=2), 1) is slow
    hot = replace(FREE, sampling=replace(FREE.sampling, temperature=0.8))
    for other in (opening(1, 2, policy=pipelined(4, 16)), hot):
        course = courses.of(other, 1)
        assert course is not None
        assert not course.rests


def test_so_has_each_number_of_texts_that_share_the_passes() -> None:
    courses = Courses()
    alone, four = courses.of(FREE, 1), courses.of(FREE, 4)
    assert alone is not four
    assert courses.of(FREE, 3) is four
    assert four is not None
    run(four, LONG, with_s=2.0, alone_s=1.0)
    assert four.rests
    assert alone is not None
    assert not alone.rests


def test_where_one_text_is_faster_alone_several_begin_so_but_not_the_other_way_round() -> None:
    courses = Courses()
    two = courses.of(FREE, 2)
    assert two is not None
    run(two, LONG, with_s=2.0, alone_s=1.0)
    assert two.is_faster_alone
    eight, one = courses.of(FREE, 8), courses.of(FREE, 1)
    assert eight is not None
    assert eight.rests
    assert one is not None
    assert not one.rests
    run(eight, LONG, with_s=1.0, alone_s=2.0)
    assert not eight.is_faster_alone, "that was only a guess"


def test_the_kinds_that_were_asked_for_last_are_remembered() -> None:
    courses = Courses()
    kinds = [
        replace(FREE, sampling=replace(FREE.sampling, temperature=n / 100))
        for n in range(MAX_KINDS + 1)
    ]
    often, once = courses.of(kinds[0], 1), courses.of(kinds[1], 1)
    for kind in kinds[2:]:
        courses.of(kind, 1)
        assert courses.of(kinds[0], 1) is often
    assert courses.of(kinds[1], 1) is not once, "forgotten"


def in_later_processes(
    num_passes: int, num_each: int, *, with_s: float, earlier: tuple[Outcome, ...] = ()
) -> tuple[list[bool], tuple[Outcome, ...]]:
    """When it rested, in processes that write a text of so many passes each; what was kept."""
    rested: list[bool] = []
    while len(rested) < num_passes:
        courses = Courses(earlier)
        course = courses.of(FREE, 1)
        assert course is not None
        rested += run(course, num_each, with_s=with_s, alone_s=1.0, catch_up=0, plain_s=1.0)
        earlier = tuple(courses.news(is_end=True)) or earlier
    return rested, earlier


@pytest.mark.parametrize("num_each", [50, 100, 127, 200, 1000])
def test_a_process_begins_as_earlier_ones_have_found_faster(num_each: int) -> None:
    rested, kept = in_later_processes(2 * LONG, num_each, with_s=1.5)
    assert sum(rested[:100]) < 100
    assert sum(rested[200:]) > 0.96 * len(rested[200:])
    assert not all(rested[200:]), "it is tried again now and then"
    # Now drafts pay, and the next trial says so.
    rested, kept = in_later_processes(2 * LONG, num_each, with_s=0.5, earlier=kept)
    assert sum(rested[LONG:]) < 0.02 * LONG
    assert [one.rests for one in kept] == [False]


def test_where_drafts_pay_short_processes_try_no_rest() -> None:
    assert not any(in_later_processes(1000, 100, with_s=0.5)[0])


def test_an_outcome_is_said_when_a_trial_and_when_a_text_has_ended() -> None:
    courses = Courses()
    course = courses.of(FREE, 1)
    assert course is not None
    assert courses.news(is_end=True) == (), "nothing was found yet"
    said = []
    for number in range(400):
        run(course, 1, with_s=2.0, alone_s=1.0, catch_up=0, plain_s=1.0)
        said += [(number, one) for one in courses.news()]
    first, outcome = said[0]
    assert first == SETTLE_DRAFTING + NUM_IN_CROWD + SETTLE_RESTING + TRIAL_OF_REST - 1
    assert outcome.rests
    assert outcome.alone == (pytest.approx(1.0), 1.0)
    assert outcome.drafted == (pytest.approx(0.5), 2.0)
    assert len(said) == 1
    (ended,) = courses.news(is_end=True)
    assert ended.num_passes == 399 - first


def test_what_is_said_in_the_last_passes_of_a_stretch_can_be_read_again() -> None:
    courses = Courses()
    course = courses.of(FREE, 8)
    assert course is not None
    for _ in range(3000):
        run(course, 1, with_s=2.0, alone_s=1.0, catch_up=0, plain_s=1.0)
        for one in courses.news(is_end=True):
            assert 0 <= one.num_passes <= one.stretch


def test_the_outcomes_of_texts_that_nobody_writes_now_stay() -> None:
    courses, hot = Courses(), replace(FREE, sampling=replace(FREE.sampling, temperature=0.8))
    for kind in (FREE, hot):
        course = courses.of(kind, 1)
        assert course is not None
        run(course, 300, with_s=2.0, alone_s=1.0, plain_s=1.0)
    found = courses.news()
    assert len({one.kind for one in found}) == len(found) == 2
    later = Courses(found)
    course = later.of(FREE, 1)
    assert course is not None
    assert later.news() == (), "nothing is new"
    run(course, 100, with_s=2.0, alone_s=1.0)
    assert {one.kind for one in later.news(is_end=True)} == {one.kind for one in found}
    crowd = later.of(hot, 8)
    assert crowd is not None
    assert crowd.rests, "where one text is faster alone, so are several"


def test_only_free_running_coupled_texts_have_a_course() -> None:
    courses = Courses()
    assert courses.of(FREE, 1) is not None
    for policy in (synchronous(4), autoregressive(), pipelined(8, 16, rest_after=0)):
        assert courses.of(opening(1, 2, policy=policy), 1) is None
    assert courses.of(replace(FREE, rule=Rule.BLOCK), 1) is None


def test_a_target_that_is_faster_alone_says_so_and_does_not_wait() -> None:
    target = Target()
    limits = replace(opening(1, 2).limits, max_len=2000)
    target.hears(opening(1, 2, policy=pipelined(8, 16), limits=limits))
    causes: list[Cause] = []
    for token in range(600):
        actions = target.ticks()
        if isinstance(actions[0], WaitUntil):  # a drafter that is silent is tried now and then
            target.now = actions[0].deadline
            actions = target.ticks()
        number = part_of(actions).number
        # Every pass takes a second; with drafts, of which none is right, two.
        pass_s = 1.0 if target.machine.rests else 2.0
        causes.append(said(target.computes(number, 3 + token % 90, pass_s=pass_s)).cause)
        assert causes[-1] in (Cause.QUIET, Cause.RESTING, Cause.ALONE, Cause.LATE)
    assert causes.count(Cause.LATE) < 10
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


def test_where_the_drafter_rests_for_all_texts_it_rests_for_a_new_one_until_its_verdict() -> None:
    drafter = Drafter(num_lanes=4)
    drafter.hears(opening(1, 2, policy=PIPELINED))
    drafter.drafts(3)
    drafter.hears(verdict((1, 2), 3, cause=Cause.RESTING))
    drafter.hears(opening(11, 12, policy=PIPELINED, session=2))
    assert drafter.ticks() == []
    # A text of another policy is of another kind.
    drafter.hears(opening(21, 22, policy=synchronous(4), session=3))
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    assert [part.opened.session for part in compute.parts] == [3]
    drafter.proposes(compute.ticket, 5)
    drafter.hears(verdict((11, 12), 7, cause=Cause.QUIET, session=2))
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    assert 2 in [part.opened.session for part in compute.parts]


def test_a_drafter_that_rests_says_nothing_before_it_wakes_up() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=replace(pipelined(8, 16), group=1)))
    drafter.drafts(3, 4, 5)
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    drafter.hears(verdict((1, 2), 3, acked=1, cause=Cause.RESTING))
    assert drafter.proposes(compute.ticket, 6) == []  # begun before it heard of the rest
    # The target lacks the second and third draft, and would take them for those of a drafter
    # that is awake if they were sent again now.
    assert drafter.hears(verdict((1, 2, 3), 4, acked=1, cause=Cause.RESTING)) == []
    (send,) = drafter.hears(verdict((1, 2, 3, 4), 5, acked=1, cause=Cause.QUIET))
    assert send == Send(draft((1, 2, 3, 4, 5), 6, number=4, first_number=1))


def course_of(target: Target) -> Course:
    """What the only text goes by."""
    course = target.machine.course
    assert course is not None
    return course


def test_a_prefill_has_its_own_price_and_does_not_count() -> None:
    target = Target()
    target.hears(opening(*range(1, 21), policy=pipelined(8, 16)))
    target.ticks()
    target.computes(1, 3, pass_s=100.0)
    target.ticks()
    assert course_of(target).num_passes == 0
    target.computes(2, 4, pass_s=1.0)
    assert course_of(target).num_passes == 1


def test_a_text_of_a_kind_that_rests_begins_with_a_rest() -> None:
    target = Target()
    first = opening(*range(1, 21), policy=pipelined(8, 16))
    course = target.known.courses.of(first, 1)
    assert course is not None
    run(course, LONG, with_s=2.0, alone_s=1.0)
    assert course.rests
    target.hears(first)
    target.ticks()
    assert said(target.computes(1, 3)).cause is Cause.RESTING


def rest_after_a_slow_beginning(course: Course) -> bool:
    """Whether it rests in the end where plain passes are faster, but not the first ones of a rest.

    That is so in a crowd until it is known on which cores they are fastest.
    """
    since = 0
    for _ in range(REST_AFTER * 3):
        since = since + 1 if course.rests else 0
        course.heard()
        course.passed(1, 1.2 if not course.rests else 1.5 if since <= 30 else 1.0, 1.0)
    return course.rests


def test_a_crowd_is_given_time_to_find_its_cores() -> None:
    alone = Course(REST_AFTER, REST_AFTER)
    crowd = Course(REST_AFTER, REST_AFTER, is_crowd=True)
    assert SETTLE_RESTING + TRIAL_OF_REST < 30 < SETTLE_IN_CROWD
    assert rest_after_a_slow_beginning(crowd)
    assert not rest_after_a_slow_beginning(alone)


def test_in_a_crowd_few_passes_are_enough_to_doubt_drafts() -> None:
    crowd = Course(REST_AFTER, REST_AFTER, is_crowd=True)
    rested = run(crowd, 200, with_s=1.2, alone_s=1.0, plain_s=1.0)
    assert rested.index(True) == SETTLE_DRAFTING + NUM_IN_CROWD < SETTLE_DRAFTING + NUM_TO_SUSPECT


def test_a_larger_crowd_begins_with_a_long_rest_where_a_smaller_one_rests() -> None:
    courses, opened = Courses(), opening(1, 2, policy=PIPELINED)
    small = courses.of(opened, 4)
    assert small is not None
    assert not small.rests
    run(small, 400, with_s=1.5, alone_s=1.0, plain_s=1.0)
    assert small.is_faster_alone
    large = courses.of(opened, 16)
    assert large is not None
    assert large.rests
    rested = run(large, 10 * opened.policy.rest_after, with_s=1.5, alone_s=1.0)
    assert rested.index(False) > 8 * opened.policy.rest_after
