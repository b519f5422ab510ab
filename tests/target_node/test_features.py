"""What a target fetches of its GPU for a head: features, and whether they are finite."""

import math

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
        found = _with_features(CHUNK, Outcome(()), features).features
    # Of a chunk of a prompt the host would look at tens of megabytes.
    assert [what for what in noted if what != KERNEL] == [DOWNLOAD, WAIT] * 2
    if bad is not None:
        assert found is None
        return
    assert found is not None
    assert (found.dtype, found.num_rows) == ("float32", 3)
    sent = torch.frombuffer(bytearray(found.data), dtype=torch.float32)
    assert torch.equal(sent, features.view(-1))
