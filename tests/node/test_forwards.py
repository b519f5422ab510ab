"""What a node says of its forwards: several that are one call are several."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordinator.tracing.spans import track_of
from engine.layout.slots import Feed
from node.forwards import Forwards, SimulatedDevice
from proto.stopwatch import Phase, Recorder, Stopwatch, records_of
from tests.engine.stand_in import WAIT, StandIn, device

__all__ = ["device"]  # a fixture

ROW = Feed((1,), (5,), (5,), 5, (1,))


class Executor:
    """Computes nothing."""

    num_uncaptured = 0

    def lay_out(self, *_: Any) -> None:
        pass

    def forward(self, *_: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros(1, 4))

    def run_chain(self, feeds: Any, *_: Any) -> torch.Tensor:
        return torch.zeros(len(feeds), 3)


def test_a_chain_that_is_one_call_counts_as_its_steps() -> None:
    times = iter(range(0, 10**9, 1000))
    heart: Any = SimpleNamespace(
        watch=Stopwatch(lambda: next(times)), progress=0, begins=lambda rows, s: None
    )
    recorder = Recorder()
    heart.watch.record(recorder)
    executor: Any = Executor()
    forwards = Forwards(executor, heart, SimulatedDevice(0.0, 0.0))
    forwards.run([ROW], [range(1)])
    forwards.done()
    nothing: Any = None
    forwards.run_chain([ROW] * 4, nothing, torch.zeros(5))
    forwards.done()
    assert heart.progress == 5
    track = track_of([records_of(recorder.take())], 0, lambda ns: ns)
    assert [(one.num_rows, one.num_asked) for one in track.forwards] == [(1, 1), (4, 4)]


def test_a_forward_that_fails_leaves_no_device_at_work() -> None:
    times = iter(range(0, 10**9, 1000))
    heart: Any = SimpleNamespace(
        watch=Stopwatch(lambda: next(times)), progress=0, begins=lambda rows, s: None
    )

    def fails(*_: Any) -> None:
        raise ValueError("no such row")

    executor: Any = Executor()
    executor.forward = fails
    forwards = Forwards(executor, heart, SimulatedDevice(1.0, 0.0))
    with pytest.raises(ValueError, match="no such row"):
        forwards.run([ROW], [range(1)])
    forwards.wait()
    beside_us = heart.watch.beside_us
    heart.watch.enter(Phase.DECIDE)
    heart.watch.enter(Phase.WAIT)
    assert heart.watch.beside_us == beside_us
    assert heart.watch.totals_us[Phase.DECIDE] > 0


@pytest.mark.parametrize(("num_asked", "waits"), [(0, [WAIT]), (1, [])])
def test_a_pass_that_is_asked_for_nothing_is_waited_for(
    num_asked: int, waits: list[str], device: StandIn
) -> None:
    # Else what a chunk of a prompt takes on a GPU would be counted as the next pass's.
    heart: Any = SimpleNamespace(
        watch=Stopwatch(lambda: 0), progress=0, begins=lambda rows, s: None
    )
    executor: Any = Executor()
    forwards = Forwards(executor, heart, SimulatedDevice(0.0, 0.0))
    with device.watch() as noted:
        forwards.run([ROW], [range(num_asked)])
        forwards.done()
        assert noted == waits
        forwards.run([ROW], [range(1)])
        forwards.done()
    assert noted == waits


def test_a_pass_that_has_failed_is_not_waited_for(device: StandIn) -> None:
    heart: Any = SimpleNamespace(
        watch=Stopwatch(lambda: 0), progress=0, begins=lambda rows, s: None
    )
    executor: Any = Executor()
    forwards = Forwards(executor, heart, SimulatedDevice(0.0, 0.0))
    forwards.run([ROW], [()])
    executor.forward = lambda *_: 1 / 0
    with device.watch() as noted:
        with pytest.raises(ZeroDivisionError):
            forwards.run([ROW], [()])
        forwards.done()
    assert noted == []
