"""A node that breaks the terms of its texts: what it is told, and when it ends."""

from typing import Any

import pytest

from node.loop import Loop
from proto.codec import encode
from proto.errors import RefusedError
from proto.messages import Fault, FaultCode
from tests.node.test_loop import Device, Heart, Link, Script, run


def test_a_node_that_is_cut_off_ends_with_the_reason() -> None:
    cut_off = encode(Fault(0, 0, FaultCode.REFUSED, "it sends too much"))
    make: Any = Loop
    loop = make(Link([[cut_off]]), Heart(), Device(), Script(lambda event: ()), None)
    with pytest.raises(RefusedError, match="refused by the coordinator: it sends too much"):
        loop.run()


def test_a_node_whose_message_was_dropped_writes_that_to_its_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run([[encode(Fault(1, 0, FaultCode.OUTSIDE, "Draft with token 100"))]])
    assert [one.getMessage() for one in caplog.records] == [
        "a message of this node was dropped: Draft with token 100"
    ]
