"""What a run of texts tells where the machine was busy."""

import pytest

from lab.pair.command import USUAL_PROMPTS, USUAL_TOKENS
from lab.pair.measuring import COMPARED, REPEATS_BELOW_S, Run, expected_s, jobs_of
from lab.pair.record import Kind
from lab.pair.requests import Said
from lab.pair.stages import check_lengths
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


def test_every_text_is_written_at_every_temperature_and_two_are_compared_greedily_and_sampled() -> (
    None
):
    prompts = [(1,), (2,), (3,)]
    jobs = jobs_of(prompts, 0.06)
    written = {(job.temperature, job.prompt) for job in jobs}
    assert written == {(value, prompt) for value in (0.0, 0.7, 0.8, 1.0) for prompt in prompts}
    compared = {(job.temperature, job.prompt, job.name) for job in jobs if job.name}
    assert compared == {
        (value, prompt, name)
        for value in (0.0, 0.8)
        for prompt in prompts[:2]
        for name in COMPARED
        if (name, prompt) != ("ar", (2,))
    }
    first, *_, last = (index for index, job in enumerate(jobs) if job.name)
    assert any(not job.name for job in jobs[first:last])  # both kinds alternate


def test_two_minutes_are_enough_where_a_pass_takes_60_ms() -> None:
    jobs = jobs_of([(number,) for number in range(USUAL_PROMPTS)], 0.06)
    assert expected_s(jobs, USUAL_TOKENS, 0.06) < 135
    assert expected_s(jobs, USUAL_TOKENS, 0.6) > 600


def test_texts_that_are_too_short_to_rehearse_are_an_error_that_says_what_helps() -> None:
    texts = [Said((1,), (2,) * 40, value, seed) for value in (0.0, 0.7, 0.8) for seed in (1, 2)]
    run = Run([*texts, Said((1,), (2,) * 63, 1.0, 1)])
    with pytest.raises(NodeError, match="after 63 tokens together, 64 are needed; give prompts"):
        check_lengths(run)
    check_lengths(Run([*texts, Said((1,), (2,) * 64, 1.0, 1)]))
