"""Which share of a device's memory each node of a pair may take."""

from dataclasses import replace

from engine.room import Utilization
from node import loading
from proto.messages import Role
from proto.node_config import NodeConfig, cache_part

CONFIG = NodeConfig(Role.TARGET, "ipc:///tmp/none", "target-1", "", "model")


def test_target_and_drafter_divide_the_memory_that_the_user_has_named() -> None:
    named = replace(CONFIG, gpu_memory_utilization=0.8)
    drafter = replace(named, role=Role.DRAFTER)
    assert cache_part(CONFIG) == 1.0
    assert cache_part(replace(CONFIG, role=Role.DRAFTER)) == 0.4
    alone = cache_part(named), cache_part(drafter)
    assert alone == (1.0, 1.0), "each has a device of its own"
    both = [cache_part(replace(one, peer_bytes=5)) for one in (named, drafter)]
    assert both == [0.6, 0.4]
    assert loading._utilization(replace(named, peer_bytes=5)) == Utilization(0.8, 5)
