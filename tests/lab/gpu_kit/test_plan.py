"""What is run, skipped, left for the next call and done again."""

from collections import defaultdict

import pytest

from lab.gpu_kit.plan import (
    CALL_LIMIT_S,
    PARTS,
    PLAN,
    REPORT_S,
    Machine,
    Outcome,
    limit_s,
    wanted,
    why_skipped,
)
from lab.gpu_kit.report import ESTIMATES, compare
from tests.lab.gpu_kit.made_up import RUN, done, row

BY_NAME = {step.name: step for step in PLAN}


def test_every_part_fits_into_one_call() -> None:
    usual: dict[int, float] = defaultdict(float)
    for step in PLAN:
        assert step.usual_s < step.limit_s < CALL_LIMIT_S
        usual[step.part] += step.usual_s
    assert max(usual.values()) < CALL_LIMIT_S - REPORT_S
    assert sum(usual.values()) < 20 * 60, "ten of thirty minutes are for mending"


def test_what_is_done_is_not_done_again_and_what_failed_is() -> None:
    rows = [done("versions"), row("flex-tests", "", "failed", "ended"), row("models", "copy")]
    left = [step.name for step in wanted((1, 2), rows)]
    assert left[:3] == ["engine-tests", "flex-tests", "models"]
    assert "versions" not in left
    assert {step.part for step in wanted((), [])} == set(PARTS)
    assert {step.part for step in wanted((3,), [])} == {3}


def test_a_step_without_what_it_needs_is_skipped_with_the_reason() -> None:
    no_gpu = Machine(why_no_gpu="no GPU here", why_no_mps="no GPU here")
    no_daemon = Machine(why_no_mps="no daemon")
    assert why_skipped(BY_NAME["texts-mps"], no_gpu) == "no GPU here"
    assert why_skipped(BY_NAME["texts-mps"], no_daemon) == "no daemon"
    assert why_skipped(BY_NAME["texts-mps"], Machine()) == ""
    assert why_skipped(BY_NAME["passes-target"], no_gpu) == ""


@pytest.mark.parametrize(
    ("left_s", "limit"), [(500.0, 300.0), (200.0, 195.0), (96.0, 91.0), (94.0, None), (0, None)]
)
def test_a_step_is_begun_only_if_there_is_time_and_ended_before_that_is_up(
    left_s: float, limit: float | None
) -> None:
    step = BY_NAME["passes-target"]
    assert (step.limit_s, step.usual_s) == (300, 90)
    assert limit_s(step, left_s, is_small=False) == limit


def test_a_rehearsal_begins_a_step_with_seconds_left() -> None:
    assert limit_s(BY_NAME["passes-target"], 30.0, is_small=True) == 25.0
    assert limit_s(BY_NAME["passes-target"], 9.0, is_small=True) is None


def test_an_outcome_says_of_every_step_of_the_parts_where_it_stands() -> None:
    outcome = Outcome.of(RUN)
    assert outcome.done == ("versions", "passes-target")
    assert outcome.skipped == ("texts-mps",)
    assert outcome.failed == ("passes-drafter",)
    assert set(outcome.left) == set(BY_NAME) - {*outcome.done, "texts-mps", "passes-drafter"}
    assert Outcome.of(RUN, (3,)) == Outcome((), ("texts-mps",), (), ("texts",))


def test_a_later_row_goes_before_an_earlier_one() -> None:
    again = [*RUN, done("passes-drafter"), row("passes-target", "graphs 500|9 rows", pass_ms=5.2)]
    assert "passes-drafter" in Outcome.of(again).done
    found = {one.estimate.what: one.measured for one in compare(again)}
    assert found["target pass, 9 rows, 500 tokens"] == 5.2


def test_a_ratio_is_one_within_what_was_expected() -> None:
    found = {one.estimate.what: one for one in compare(RUN)}
    assert found["plain decoding, a token"].ratio == 1.0
    assert found["target pass, 9 rows, 500 tokens"].ratio == pytest.approx(1.5)
    assert found["target pass, 17 rows, 500 tokens"].ratio is None


def test_estimates_are_of_steps_that_are_measured() -> None:
    assert {one.step for one in ESTIMATES} <= set(BY_NAME)
