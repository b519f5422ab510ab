"""What a run of texts tells where the machine was busy."""

import pytest

from lab.pair.measuring import REPEATS_BELOW_S, Run, expected_s, jobs_of
from lab.pair.record import Kind
from proto.errors import NodeError


def test_the_way_of_a_draft_is_taken_where_the_target_waits_if_one_came_there() -> None:
    run = Run()
    with pytest.raises(NodeError, match="no draft reached the target"):
        _ = run.way_s
    run.ways_s[Kind.BESIDE] += [0.5, 0.7, 0.9]
    assert run.way_s == 0.7
    run.ways_s[Kind.APART] += [0.1, 0.2, 0.9]
    assert run.way_s == 0.2


def test_texts_of_a_fast_pair_are_compared_several_times() -> None:
    prompts = [(1,), (2,), (3,)]
    slow, fast = (jobs_of(prompts, seconds) for seconds in (0.06, REPEATS_BELOW_S / 3.5))
    assert len(fast) - len(slow) == 2 * sum(bool(job.name) for job in slow)
    assert {job.temperature for job in slow} == {0.0, 0.7, 1.0}
    assert all(
        {job.prompt for job in slow if job.temperature == t} == set(prompts) for t in (0.7, 1)
    )


def test_two_minutes_are_enough_where_a_pass_takes_60_ms() -> None:
    jobs = jobs_of([(number,) for number in range(6)], 0.06)
    assert expected_s(jobs, 80, 0.06) < 135
    assert expected_s(jobs, 80, 0.6) > 600
