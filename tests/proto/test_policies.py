"""The table of policies."""

from typing import get_args

import pytest

from proto.messages import Policy
from proto.policies import POLICIES, REST_AFTER, TABLE, PolicyName, Row, without_drafter


def test_every_name_has_one_row() -> None:
    assert tuple(row.name for row in TABLE) == tuple(POLICIES) == get_args(PolicyName)


def test_the_rows_say_what_the_nodes_are_told() -> None:
    assert POLICIES["ar"].make(4, 16) == Policy("ar", 0, 0, 0)
    assert POLICIES["sync"].make(4, 16) == Policy("sync", 4, 4, 4)
    chain = Policy("pipelined", 4, 2, 16, group=4, min_score=-3.0, rest_after=REST_AFTER)
    assert POLICIES["pipelined"].make(4, 16) == chain


def test_only_where_it_may_rest_the_drafter_does() -> None:
    assert POLICIES["pipelined"].make(4, 16, adaptive=False).rest_after == 0
    assert POLICIES["sync"].make(4, 16).rest_after == 0


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_what_drafts_has_a_paper_and_a_drafter(row: Row) -> None:
    assert bool(row.paper) == row.drafts == row.make(4, 16).has_drafter


def test_a_target_that_drafts_by_itself_waits_for_nobody() -> None:
    alone = without_drafter(POLICIES["sync"].make(4, 16))
    assert (alone.num_speculative_tokens, alone.launch_min, alone.has_drafter) == (4, 0, False)
