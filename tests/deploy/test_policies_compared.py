"""The comparison of policies: all of the table, each at its best, with an honest interval."""

import random
from statistics import median

import pytest

from coordinator.api.config import PairConfig
from deploy.experiments.policies import DRAFTS, interval, rehearsed, settings, table
from deploy.experiments.tables import paired_ratios
from proto.errors import ConfigurationError
from proto.policies import TABLE
from rehearsal.acceptance import chances, drawn
from tests.deploy.test_tables import Run, text

SLOW = PairConfig(
    simulate_target_ms=30.0, simulate_draft_ms=3.0, link=("drafter:delay=3ms",), max_num_seqs=1
)


def test_every_policy_that_drafts_is_swept_with_settings_that_differ() -> None:
    assert set(DRAFTS) == {row.name for row in TABLE if row.drafts}
    for policy in DRAFTS:
        made = [setting.make(PairConfig()) for setting in settings(policy).values()]
        assert len(set(made)) == len(made)


def test_a_sweep_is_rehearsed_with_the_costs_that_are_simulated() -> None:
    trace = drawn(chances("0.7"), 1, 80)
    tried = settings("sync")
    speeds = rehearsed(tried, SLOW, trace)
    near = rehearsed(tried, SLOW.model_copy(update={"link": ()}), trace)
    assert all(near[name] > speeds[name] > 1 / 0.0303 for name in list(tried)[1:4])
    with pytest.raises(ConfigurationError, match="give --simulate-target-ms and"):
        rehearsed(tried, PairConfig(), trace)


def test_nineteen_of_twenty_intervals_hold_the_median() -> None:
    draw = random.Random(3)
    held = 0
    for _ in range(400):
        low, high = interval([draw.gauss(1.0, 0.2) for _ in range(40)])
        held += low <= 1.0 <= high
    assert 0.93 * 400 <= held < 400


def test_a_line_has_ratios_within_prompt_and_repetition() -> None:
    runs = [
        Run(arm, prompt, 0, 0.0, text(0, speed * (1 + prompt)))
        for arm, speed in (("ar", 10.0), ("sync K=2", 20.0), ("tree", 30.0))
        for prompt in range(10)
    ]
    assert median(paired_ratios(runs, "tree", "ar")) == pytest.approx(3.0)
    line = table(runs, ["ar", "tree"], "sync K=2").splitlines()[-1].split()
    assert line[:6] == ["tree", "165.0", "3.00", "(3.00-3.00)", "1.50", "(1.50-1.50)"]
