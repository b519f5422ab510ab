"""A loop beside a device that ends early, late or never."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from node.events import Afterwards, Tick
from node.loop import Loop
from node.turns import POLL_S
from proto import errors
from tests.node.test_loop import Compute, Device, Done, Ended, Heart, Link, Script, Steps


@dataclass
class Played:
    """A forward on a device that is due at 1.0 and is ready, by this clock, at another time."""

    clock: Steps
    ready_at: float
    due_at: float = 1.0
    is_on_host: bool = False

    def is_ready(self) -> bool:
        """The device's flag."""
        return self.clock.now() >= self.ready_at

    def finish(self, *, has_slept: bool) -> Done:
        """What may be read then."""
        assert self.is_ready(), "a result is read before it is ready"
        return Done(1)


def played(ready_at: float, *times: float) -> tuple[Script, Link]:
    """A loop beside such a device, at these times; the forward is launched at the first."""
    clock, asked = Steps(*times), iter([Compute(1)])
    script = Script(lambda event: list(asked) if event == Tick() else [])
    link = Link([[] for _ in times], clock=clock)
    make: Any = Loop
    with pytest.raises((Ended, errors.NodeError)) as caught:
        make(
            *(link, Heart(), Device(), script),
            lambda action: Played(clock, ready_at),
            clock.now,
        ).run()
    if isinstance(caught.value, errors.NodeError):
        raise caught.value
    return script, link


def test_a_device_is_believed_when_it_says_that_it_is_ready_early_or_late() -> None:
    script, link = played(0.5, 0.0, 0.0, 0.6)
    assert script.events[:4] == [Tick(), Done(1), Tick(), Afterwards()]
    script, link = played(3.0, 0.0, 0.0, 1.0, 2.0, 3.0)
    assert script.events == [*[Tick()] * 3, Done(1), Tick(), Afterwards(), Tick(), Tick()]
    assert link.waits[1:4] == [1.0, POLL_S, POLL_S], "it is asked again and again"


def test_a_device_that_never_ends_ends_the_node_with_one_line() -> None:
    with pytest.raises(errors.NodeError, match="61 s late with a forward pass") as caught:
        played(math.inf, 0.0, 0.0, 30.0, 62.0, 63.0)
    assert "\n" not in str(caught.value)
