"""What is predicted: plain decoding exactly, and which way things go."""

import math
from dataclasses import replace

import pytest

from proto.policies import POLICIES, TABLE
from rehearsal.acceptance import chances, drawn
from rehearsal.planning import Case, make_plan, rehearse, roofline
from rehearsal.setting import Forwards, NodeCosts

TRACE = drawn(chances("0.75"), 1, 120)
CASE = Case(
    target=NodeCosts(Forwards(((1, 0.030),), 0.0003), host_s=0.0001),
    drafter=NodeCosts(Forwards(((1, 0.002),)), hop_s=0.0001),
    trace=TRACE,
)


def test_plain_decoding_takes_a_pass_and_its_host_time_for_each_token() -> None:
    figures = rehearse(POLICIES["ar"].make(0, 0), CASE.target, CASE.drafter, TRACE)
    assert figures.tokens_per_second == pytest.approx(1 / 0.0301)
    assert (figures.tokens_per_pass, figures.num_drafted) == (1.0, 0)
    assert figures.target_busy == pytest.approx(0.030 / 0.0301)


def test_of_a_whole_text_everything_counts_but_its_first_token() -> None:
    policy = POLICIES["sync"].make(4, 4)
    whole = rehearse(policy, CASE.target, CASE.drafter, TRACE, is_whole=True)
    part = rehearse(policy, CASE.target, CASE.drafter, TRACE)
    assert part.num_tokens < whole.num_tokens == len(TRACE[0]) - 1


def test_every_policy_of_the_table_has_its_best_setting() -> None:
    made = make_plan(CASE, drafts=(1, 4), wider=(32,))
    assert [cell.policy for cell in made.best] == [row.name for row in TABLE if row.drafts]
    for cell in made.best:
        same = [made.speedup(other) for other in made.cells if other.policy == cell.policy]
        assert made.speedup(cell) == max(same) > 1.5
    assert made.winner in made.best


def test_where_drafting_costs_as_much_as_the_target_nothing_wins() -> None:
    slow = replace(CASE, drafter=NodeCosts(Forwards(((1, 0.030),)), hop_s=0.01))
    made = make_plan(slow, drafts=(1, 3), wider=())
    assert made.winner is None


def test_two_texts_at_once_share_the_passes() -> None:
    alone = rehearse(POLICIES["sync"].make(4, 4), CASE.target, CASE.drafter, TRACE)
    two = drawn(chances("0.75"), 2, 120)
    both = rehearse(POLICIES["sync"].make(4, 4), CASE.target, CASE.drafter, two, at_once=2)
    assert 1.5 < both.tokens_per_second / alone.tokens_per_second < 2.05


def test_a_farther_drafter_costs_a_synchronous_policy_each_way_of_each_pass() -> None:
    policy = POLICIES["sync"].make(4, 4)
    near = rehearse(policy, CASE.target, CASE.drafter, TRACE)
    far = rehearse(policy, CASE.target, replace(CASE.drafter, hop_s=0.0101), TRACE)
    more_s = near.tokens_per_pass * (1 / far.tokens_per_second - 1 / near.tokens_per_second)
    assert more_s == pytest.approx(0.020, rel=0.01)


def test_on_the_roofline_rows_are_free_until_the_weights_are_read() -> None:
    # 8e9 parameters, 2 bytes each: read in 4 ms; 16e9 FLOPs for a row: 1 ms.
    forwards = roofline(8e9, 16e9, bandwidth=4e12, peak=16e12)
    assert [forwards.of(rows) for rows in (1, 4, 5, 8)] == pytest.approx([4e-3, 4e-3, 5e-3, 8e-3])
    assert roofline(8e9, 16e9, 4e12, math.inf).of(64) == pytest.approx(4e-3)
    assert roofline(8e9, 16e9, 1e18, 16e12).of(2) == pytest.approx(2e-3)


def test_forwards_between_known_numbers_of_rows_lie_on_a_straight_line() -> None:
    forwards = Forwards(((1, 2.0), (5, 4.0)), 0.25)
    assert [forwards.of(rows) for rows in (1, 3, 5, 9)] == [2.0, 3.0, 4.0, 5.0]
    assert Forwards(((2, 2.0),)).of(1) == 2.0
