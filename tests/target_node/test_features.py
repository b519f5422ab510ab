"""What a target fetches of its GPU for a head: features, and whether they are finite."""

import math
from dataclasses import replace

import pytest
import torch

from engine.layout.slots import Feed
from target_node.compute import Outcome, Part
from target_node.worker import _with_features
from tests.engine.stand_in import DOWNLOAD, KERNEL, WAIT, StandIn, device
from tests.texts import opening

__all__ = ["device"]  # a fixture
FEED = Feed((1, 2, 3), (0, 1, 2), (0, 1, 2), 0, None)
CHUNK = Part(opening(1, 2, 3), 0, (), FEED, 0, (), layers=(1,))


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_whether_features_are_finite_is_decided_where_they_are(
    bad: float | None, device: StandIn
) -> None:
    features = torch.randn(3, 8)
    if bad is not None:
        features[1, 2] = bad
    device.keep(device.there, features)
    with device.watch() as noted:
        found = _with_features(CHUNK, Outcome(()), features, CHUNK.layers).features
    # Of a chunk of a prompt the host would look at tens of megabytes.
    assert [what for what in noted if what != KERNEL] == [DOWNLOAD, WAIT] * 2
    if bad is not None:
        assert found is None
        return
    assert found is not None
    assert (found.dtype, found.num_rows) == ("float32", 3)
    sent = torch.frombuffer(bytearray(found.data), dtype=torch.float32)
    assert torch.equal(sent, features.view(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_features_that_are_not_finite_are_not_told(bad: float | None, dtype: torch.dtype) -> None:
    features = torch.tensor([[0.0, -0.0, 1e-8], [6e4, -6e4, 3.0], [1.0, 2.0, 3.0]], dtype=dtype)
    if bad is not None:
        features[1, 2] = bad
    found = _with_features(CHUNK, Outcome(()), features, CHUNK.layers).features
    assert (found is None) is (bad is not None)


@pytest.mark.parametrize("layers", [(1,), (4, 7), (7, 1)])
def test_of_a_pass_whose_texts_want_different_layers_each_gets_its_own(
    layers: tuple[int, ...],
) -> None:
    states = {layer: torch.randn(3, 8) for layer in (1, 4, 7)}
    features = torch.cat([states[layer] for layer in (4, 7, 1)], dim=1)
    part = replace(CHUNK, layers=layers)
    found = _with_features(part, Outcome(()), features, (4, 7, 1)).features
    assert found is not None
    sent = torch.frombuffer(bytearray(found.data), dtype=torch.float32).view(3, -1)
    assert torch.equal(sent, torch.cat([states[layer] for layer in layers], dim=1))
