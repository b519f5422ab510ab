"""Where the time of a loop goes: under a forward, beside it, or nowhere."""

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.forward.forward import Output
from node.events import Afterwards, Arrived, Send, Tick
from node.forwards import Forwards, SimulatedDevice
from node.loop import Loop
from node.turns import IDLE_S, Launched
from proto.codec import encode
from proto.stopwatch import Phase, Stopwatch
from tests.node.test_loop import CLOSE, Action, Compute, Done, Ended, Event, Script


class Clock:
    """One clock of the loop, of its stopwatch and of the device; it goes when somebody works."""

    def __init__(self) -> None:
        self.us = 0

    def seconds(self) -> float:
        """What `time.perf_counter` says."""
        return self.us / 1e6

    def works(self, us: int) -> None:
        """So much time goes by."""
        self.us += us


class TimedLink:
    """Frames that come after so many microseconds; else it waits as long as it may."""

    def __init__(self, clock: Clock, turns: list[int | None]) -> None:
        self.clock, self.turns = clock, turns

    def receive(self, timeout_s: float, *, exact: bool) -> Iterator[bytes]:
        """The only frame of the next turn, or none."""
        if not self.turns:
            raise Ended
        after_us = self.turns.pop(0)
        self.clock.works(round(timeout_s * 1e6) if after_us is None else after_us)
        return iter([] if after_us is None else [encode(CLOSE)])

    def send(self, frame: bytes) -> bool:
        """It takes a while."""
        self.clock.works(100)
        return True


class TimedExecutor:
    """An executor whose every step takes the host a while."""

    fixed_rows = None
    num_uncaptured = 0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def lay_out(self, *_: Any) -> None:
        """Masks and tensors."""
        self.clock.works(300)

    def forward(self, *_: Any) -> Output:
        """What the host computes in place of the device, or by itself."""
        self.clock.works(500)
        return Output(torch.zeros(0, 4))


def timed(
    monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice, turns: list[int | None], clock: Clock
) -> Stopwatch:
    """The stopwatch of a loop that is asked for two forwards, decides for 200 us at each tick, for
    700 us of each message and for 400 us of each result, and sends a message of each."""
    monkeypatch.setattr(time, "perf_counter", clock.seconds)
    watch = Stopwatch(lambda: clock.us * 1000)
    heart = SimpleNamespace(
        marks=(), progress=0, watch=watch, begins=lambda rows, s: None, ends=lambda: None
    )
    executor: Any = TimedExecutor(clock)
    forwards = Forwards(executor, cast(Any, heart), device)
    asked = iter([Compute(1), Compute(2)])

    def launch(action: Compute) -> Launched[Done]:
        forwards.run([], [])
        clock.works(50)  # the choice
        forwards.done()
        return forwards.as_launched(lambda: Done(action.ticket))

    def answers(event: Event) -> Sequence[Action]:
        match event:
            case Tick():
                clock.works(200)
                is_idle = heart.progress == len(done)
                return [action] if is_idle and (action := next(asked, None)) else []
            case Done():
                done.append(event)
                clock.works(400)
            case Arrived():
                clock.works(700)
            case Afterwards():
                return [Send(CLOSE)]
        return []

    done: list[Done] = []
    make: Any = Loop
    link = TimedLink(clock, turns)
    with pytest.raises(Ended):
        make(link, heart, executor, Script(answers), launch, clock.seconds).run()
    return heart.watch


def us_of(sums: Sequence[int]) -> dict[str, int]:
    """What is not nothing, by its phase."""
    return {phase.name.lower(): us for phase, us in zip(Phase, sums, strict=True) if us}


def test_work_under_a_forward_is_counted_beside_the_device_and_all_adds_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    device = SimulatedDevice(0.005, 0.0, clock=clock.seconds)
    # Begins, waits for a message, waits for the end; under the second forward a message comes so
    # late that it is handled beyond the end, which is seen then.
    watch = timed(monkeypatch, device, [None, 1000, None, 3600, None], clock)
    # The second forward is launched 0.4 + 0.2 + 0.3 ms after the end of the first one. Under it:
    # 0.55 ms of computing, 0.1 of sending, 0.2 of a tick and 3.6 of waiting leave 0.55 ms of the
    # 0.7 ms for the message.
    exposed = {
        "prepare": 2 * 300,
        "decide": 200 + (400 + 200) + (150 + 400 + 200 + 200) + 200,
        "send": 100,
        "wait": round(IDLE_S * 1e6),  # of the last turn
    }
    beside = {
        "wait": 1000 + (5000 - 550 - 1000 - 700 - 200) + 3600,
        "decide": (700 + 200) + (200 + 550),
        "model": 2 * 500,
        "choose": 2 * 50,
        "send": 100,
    }
    assert us_of(watch.totals_us) == exposed
    assert us_of(watch.beside_us) == beside
    assert sum(watch.beside_us) == 2 * 5000
    assert sum(watch.totals_us) + sum(watch.beside_us) == clock.us


def test_where_the_host_computes_nothing_is_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = timed(monkeypatch, SimulatedDevice(0.0, 0.0), [None, 1000, None], clock)
    assert us_of(watch.beside_us) == {}
    assert us_of(watch.totals_us)["model"] == 2 * 500
    assert sum(watch.totals_us) == clock.us
