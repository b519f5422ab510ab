"""What the figure of `plan` shows, drawn on paper that remembers."""

from unittest.mock import MagicMock

import pytest

from lab.plan import figure
from proto.policies import TABLE
from rehearsal.acceptance import chances, drawn
from rehearsal.planning import Case
from rehearsal.setting import Forwards, NodeCosts

CASE = Case(
    NodeCosts(Forwards(((1, 0.030),))),
    NodeCosts(Forwards(((1, 0.002),))),
    drawn(chances("0.75"), 1, 96),
)


def test_more_acceptance_is_faster_and_more_distance_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = {"TOKENS": 64, "DRAFTS": (3,), "ACCEPTANCES": (0.4, 0.9), "HOPS": (0.0, 1.0)}
    for name, value in small.items():
        monkeypatch.setattr(figure, name, value)
    paper, left, right = MagicMock(), MagicMock(), MagicMock()
    paper.subplots.return_value = left, right
    figure.draw(paper, CASE, lambda _: None)
    drafting = [row.name for row in TABLE if row.drafts]
    for axes, values in ((left, (0.4, 0.9)), (right, (0.0, 1.0))):
        assert [call.kwargs["label"] for call in axes.plot.call_args_list] == drafting
        assert all(call.args[0] == values for call in axes.plot.call_args_list)
    for call in left.plot.call_args_list:
        few, many = call.args[1]
        assert many > few
    for call in right.plot.call_args_list:
        near, far = call.args[1]
        assert near > far
