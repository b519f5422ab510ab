"""Logprobs of the model's own distribution."""

import math

import numpy as np
import pytest
import torch

import engine.choice.logprobs
from engine.choice.logprobs import Reported, report, report_there
from engine.choice.sampling import LOWEST
from engine.errors import NotFinite


@pytest.mark.parametrize("num_top", [0, 1, 5, 500])
def test_logprobs_are_those_of_torch_with_the_token_first(num_top: int) -> None:
    logits = 3 * torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    tokens = (3, int(logits[1].argmax()), 99, 0)
    got = report(logits, tokens, num_top)
    width = 1 + min(num_top, 100)
    want = torch.log_softmax(logits.double(), dim=1)
    ids, values = np.reshape(got.ids, (4, width)), np.reshape(got.values, (4, width))
    for row, token in enumerate(tokens):
        assert ids[row, 0] == token
        assert values[row] == pytest.approx(want[row][ids[row]].numpy(), abs=1e-5)
        assert ids[row, 1:].tolist() == want[row].topk(width - 1).indices.tolist()
        assert got.ranks[row] == 1 + int((want[row] > want[row][token]).sum())
    assert got.ranks[1] == 1


def test_equal_logits_are_ranked_by_id_as_greedy_chooses() -> None:
    got = report(torch.zeros(1, 4), (2,), 2)
    assert got.ids == (2, 0, 1)
    assert got.ranks == (3,)
    assert got.values == pytest.approx([math.log(0.25)] * 3)


def test_only_rows_that_have_a_token_are_reported_and_every_value_is_finite() -> None:
    logits = torch.tensor([[0.0, -math.inf], [0.0, 0.0]])
    got = report(logits, (1,), 0)
    assert (got.ids, got.values, got.ranks) == ((1,), (LOWEST,), (2,))


def assert_alike(got: Reported, want: Reported) -> None:
    assert (got.ids, got.ranks) == (want.ids, want.ranks)
    assert got.values == pytest.approx(want.values, abs=1e-5)


@pytest.mark.parametrize("num_top", [0, 1, 5, 500])
def test_on_a_device_they_are_those_of_the_host(
    num_top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.choice.logprobs, "RANKED_AT_ONCE", 250)  # so that there are pieces
    logits = (3 * torch.randn(7, 100, generator=torch.Generator().manual_seed(1))).round()
    logits[:, 40:60] = -math.inf
    logits[3] = 1e38 * logits[3].sign()
    tokens = (3, int(logits[1].argmax()), 99, 0, 50, 7, 7)
    assert_alike(report_there(logits, tokens, num_top), report(logits, tokens, num_top))


def test_on_a_device_logits_that_are_not_finite_are_none() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = math.nan
    with pytest.raises(NotFinite):
        report_there(logits, (1, 2), 3)
