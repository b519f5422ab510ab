"""A forward on a simulated device ends when it should, or is told to have overrun."""

import time
from dataclasses import dataclass, field
from statistics import median

import pytest

from node.forwards import AWAKE_S, LATE_S, LATE_SHARE, SimulatedDevice
from proto.messages import Role
from proto.node_config import NodeConfig

TICK_S = 10e-6


@dataclass
class Clock:
    """Time that passes while somebody sleeps, by a little more than asked for, or looks at it."""

    now: float = 100.0
    oversleep_s: float = 0.0
    slept: list[float] = field(default_factory=list)

    def read(self) -> float:
        """Looking takes a moment."""
        self.now += TICK_S
        return self.now

    def sleep(self, seconds: float) -> None:
        """Take a note."""
        self.slept.append(seconds)
        self.now += seconds + self.oversleep_s


def device(clock: Clock, forward_s: float, row_s: float = 0.0) -> SimulatedDevice:
    return SimulatedDevice(forward_s, row_s, clock=clock.read, sleep=clock.sleep)


def test_it_sleeps_through_most_of_the_forward_and_is_awake_at_its_end() -> None:
    clock = Clock(now=100.004)
    device(clock, 0.012).wait_until(100.012)
    assert clock.slept == [pytest.approx(0.008 - AWAKE_S - TICK_S)]
    assert clock.now == pytest.approx(100.012, abs=2 * TICK_S)


def test_it_does_not_sleep_when_there_is_hardly_time_left() -> None:
    clock = Clock(now=100.0119)
    device(clock, 0.012).wait_until(100.012)
    assert clock.slept == []
    assert clock.now >= 100.012


def test_every_row_costs_and_a_prefill_is_one_forward_of_many() -> None:
    simulated = device(Clock(), 0.03, 0.0001)
    assert simulated.forward_s(1) == pytest.approx(0.0301)
    assert simulated.forward_s(512) == pytest.approx(0.0812)
    assert device(Clock(), 0.0, 0.001).end_of(100.0, 5) == (pytest.approx(100.005), 0.0)


@pytest.mark.parametrize(
    ("forward_s", "late_s", "expected"),
    [
        (0.001, 0.5 * LATE_S, "in time"),
        (0.001, 1.5 * LATE_S, "overrun"),
        (0.4 * LATE_S, 0.9 * LATE_S, "overrun"),  # a device that this one cannot keep up with
        (1.0, 0.9 * LATE_SHARE, "in time"),
        (1.0, 1.1 * LATE_SHARE, "overrun"),
    ],
)
def test_what_was_computed_too_slowly_here_has_overrun(
    forward_s: float, late_s: float, expected: str
) -> None:
    clock = Clock(now=100.0 + forward_s + late_s)
    end, late_by_s = device(clock, forward_s).end_of(100.0, 1)
    assert late_by_s == pytest.approx(late_s if expected == "overrun" else 0.0, abs=3 * TICK_S)
    assert end == pytest.approx(100.0 + forward_s + late_s, abs=3 * TICK_S)  # no sooner than it was
    assert clock.slept == []


def test_who_was_woken_too_late_has_overrun() -> None:
    clock = Clock(oversleep_s=AWAKE_S + 2 * LATE_S)
    simulated = device(clock, 0.005)
    end, late_s = simulated.end_of(clock.now, 1)
    assert late_s == 0.0
    assert simulated.wait_until(end)
    assert simulated.late_s(end, 1) == pytest.approx(2 * LATE_S, abs=3 * TICK_S)
    assert not simulated.wait_until(end)


def test_the_config_says_whether_anything_is_simulated() -> None:
    config = NodeConfig(Role.TARGET, "ipc:///tmp/none", "target-1", "", "model")
    assert not SimulatedDevice.of(config).is_simulated
    config = NodeConfig(
        Role.TARGET, "ipc:///tmp/none", "target-1", "", "model", simulated_ms_per_row=2.0
    )
    simulated = SimulatedDevice.of(config)
    assert simulated.is_simulated
    assert simulated.forward_s(3) == pytest.approx(0.006)


def test_real_time_is_kept() -> None:
    simulated = SimulatedDevice(0.003, 0.0)
    took: list[float] = []
    for _ in range(30):
        started = time.perf_counter()
        simulated.wait_until(simulated.end_of(started, 1)[0])
        took.append(time.perf_counter() - started)
    assert min(took) >= 0.003
    assert median(took) < 0.006  # on a machine that has other things to do
