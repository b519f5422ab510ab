"""The table of policies."""

import math
from dataclasses import replace
from typing import get_args

import pytest

from proto.messages import Policy
from proto.policies import (
    OPTIONS,
    POLICIES,
    REST_AFTER,
    TABLE,
    PolicyName,
    PolicyRow,
    drafts_ahead,
    without_drafter,
    without_prices,
)


def test_every_name_has_one_row() -> None:
    assert tuple(row.name for row in TABLE) == tuple(POLICIES) == get_args(PolicyName)


def test_the_rows_say_what_the_nodes_are_told() -> None:
    assert POLICIES["ar"].make(4, 0) == Policy("ar", 0, 0, 0, 0)
    assert POLICIES["sync"].make(4, 16) == Policy("sync", 4, 4, 4, 4)
    chain = Policy(
        "pipelined",
        4,
        2,
        2,
        16,
        group=4,
        min_score=-3.0,
        prices_rows=True,
        prices_waits=True,
        rest_after=REST_AFTER,
    )
    assert POLICIES["pipelined"].make(4, 16) == chain


def test_only_where_it_may_rest_the_drafter_does() -> None:
    assert POLICIES["pipelined"].make(4, 16, adaptive=False).rest_after == 0
    assert POLICIES["sync"].make(4, 16).rest_after == 0


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_what_drafts_has_a_paper_and_a_drafter(row: PolicyRow) -> None:
    assert bool(row.paper) == row.drafts == row.make(4, 16).has_drafter


def test_a_drafter_drafts_ahead_where_its_policy_says_so_unless_the_models_take_turns() -> None:
    made = {row.name: row.make() for row in TABLE if row.drafts}
    ahead = {name for name, policy in made.items() if drafts_ahead(policy, takes_turns=False)}
    assert ahead == {row.name for row in TABLE if row.runs_ahead and row.window > row.k}
    assert "sync" not in ahead
    assert "auto" in ahead
    assert not any(drafts_ahead(policy, takes_turns=True) for policy in made.values())


def test_options_replace_numbers_of_a_row_as_far_as_k_allows() -> None:
    options = {"width": 3.0, "launch_min": 6.0, "min_score": -2.5, "subtree": 0.0}
    policy = POLICIES["tree"].make(4, 16, options=options)
    assert (policy.width, policy.launch_min, policy.min_score) == (3, 4, -2.5)
    assert policy.subtree is False
    assert isinstance(policy.width, int)
    untouched = POLICIES["tree"].make(4, 16)
    assert (policy.branches, policy.window) == (untouched.branches, untouched.window)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_refused_just_outside_of_its_range(name: str) -> None:
    low, high = OPTIONS[name]
    for value in (low, high):
        POLICIES["tree"].make(4, 16, options={name: value})
    for value in (low - 1, high + 1, math.nan):
        with pytest.raises(ValueError, match=f"^{name} is a .*, not "):
            POLICIES["tree"].make(4, 16, options={name: value})


def test_an_option_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"^there is no 'k'; there are .*width"):
        POLICIES["tree"].make(4, 16, options={"k": 3})


def test_a_target_that_drafts_by_itself_waits_for_nobody() -> None:
    alone = without_drafter(POLICIES["sync"].make(4, 16))
    assert (alone.num_speculative_tokens, alone.launch_min, alone.has_drafter) == (4, 0, False)


def test_what_costs_decide_is_said_in_the_row_and_by_no_other_number() -> None:
    auto = POLICIES["auto"].make()
    narrow = POLICIES["auto"].make(options={"branches": 1})
    assert (narrow.prices_rows, narrow.prices_waits, narrow.prices_awaited) == (True, True, True)
    restless = POLICIES["auto"].make(options={"rest_after": 0})
    assert restless == replace(auto, rest_after=0)
    assert not restless.may_rest
    fixed = POLICIES["auto"].make(adaptive=False)
    assert fixed == without_prices(auto)
    assert not any((fixed.prices_rows, fixed.prices_waits, fixed.prices_awaited, fixed.may_rest))
