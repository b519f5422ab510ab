"""What a node asks a GPU for: a pass is launched without waiting, and ended when it is ready."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.checkpoint.model import load_model
from engine.choice.coupling import usual_choices
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from node.forwards import ASKED_FROM, NUM_RECENT, Forwards, OnDevice, SimulatedDevice
from node.turns import Ended
from proto.messages import SamplingSpec
from proto.stopwatch import Phase, Stopwatch
from target_node.compute import Compute, Part
from target_node.worker import Worker
from tests.engine.stand_in import DOWNLOAD, LAUNCH, UPLOAD, WAIT, StandIn, device
from tests.engine.test_device_calls import a_step
from tests.tiny_models import make_model

__all__ = ["device"]  # a fixture

GREEDY = SamplingSpec()
SEEDED = SamplingSpec(temperature=0.8, seed=7)
PENALISED = SamplingSpec(temperature=0.8, seed=7, presence_penalty=1.5)


def heart() -> Any:
    """Of a node that nobody watches, but for its stopwatch."""
    times = iter(range(0, 10**9, 1000))
    return SimpleNamespace(
        watch=Stopwatch(lambda: next(times)),
        progress=0,
        num_uncaptured=0,
        trouble=list[str]().append,
        begins=lambda rows, s: None,
        ends=lambda: None,
    )


def a_target(folder: Path) -> ModelExecutor:
    loaded = load_model(str(make_model("llama", folder, scale=0.5)), dtype="float32")
    made = make_executor(loaded, 600, num_lanes=2, backend="graphs", row_counts=(1, 4))
    made.warm_up((1,), choices=usual_choices(()))
    return made


def a_part(spec: SamplingSpec, num_rows: int, lane: int) -> Part:
    """The last committed token of a text, and a chain of drafts behind it."""
    feed, session = a_step(40, num_rows, lane), lane + 1
    opened: Any = SimpleNamespace(session=session, sampling=spec, num_prompt=3)
    positions, parents = tuple(range(41, 41 + num_rows)), tuple(range(num_rows - 1))
    return Part(opened, 1, [5] * 41, feed, num_rows, positions, parents=parents)


@pytest.mark.parametrize("second", [GREEDY, SEEDED, PENALISED], ids=["same", "other", "penalty"])
def test_passes_and_choices_of_all_texts_are_launched_and_nothing_is_waited_for(
    second: SamplingSpec, device: StandIn, tmp_path: Path
) -> None:
    executor, on_gpu = a_target(tmp_path), heart()
    parts = (a_part(GREEDY, 4, 0), a_part(second, 4, 1))
    host = Worker(Forwards(executor, heart(), SimulatedDevice(0.0, 0.0)))
    wanted = host.launch(Compute(1, parts))
    assert isinstance(wanted, Ended)
    worker = Worker(
        Forwards(executor, on_gpu, SimulatedDevice(0.0, 0.0), None, {8: 0.01}, on_gpu=True)
    )
    device.holds = True
    with device.watch() as noted:
        launched = worker.launch(Compute(1, parts))
        assert isinstance(launched, OnDevice)
        assert not launched.is_ready()
    said = [what for what in noted if what in (UPLOAD, LAUNCH, DOWNLOAD, WAIT)]
    choice = [UPLOAD, LAUNCH, DOWNLOAD]
    assert WAIT not in noted, "the host would be deaf for the whole pass"
    if second is not PENALISED:
        assert said == [UPLOAD, LAUNCH, *choice, *choice]
    device.holds = False
    assert launched.is_ready()
    made = launched.finish(has_slept=True)
    assert made.outcomes == wanted.result.outcomes
    assert [len(one.tokens) for one in made.outcomes] == [4, 4]


def test_a_gpu_is_asked_at_once_and_then_shortly_before_the_quickest_of_the_last_passes_ended(
    device: StandIn, tmp_path: Path
) -> None:
    # What is expected at load says nothing of numbers of rows that were not timed there.
    forwards = Forwards(
        *(a_target(tmp_path), heart(), SimulatedDevice(0.0, 0.0), None, {1: 5.0}), on_gpu=True
    )
    worker = Worker(forwards)
    took: list[float] = []
    for _ in range(NUM_RECENT + 2):
        launched = worker.launch(Compute(1, (a_part(SEEDED, 1, 0),)))
        assert isinstance(launched, OnDevice)
        quickest_s = min(took[-NUM_RECENT:], default=0.0)
        assert launched.due_at == pytest.approx(forwards._started + ASKED_FROM * quickest_s)
        launched.finish(has_slept=False)
        took.append(forwards._recent[1][-1])


def test_what_the_host_does_meanwhile_delays_nothing(device: StandIn, tmp_path: Path) -> None:
    on_gpu = heart()
    worker = Worker(Forwards(a_target(tmp_path), on_gpu, SimulatedDevice(0.0, 0.0), on_gpu=True))
    launched = worker.launch(Compute(1, (a_part(SEEDED, 1, 0),)))
    for phase in (Phase.DECODE, Phase.DECIDE, Phase.WAIT):
        on_gpu.watch.enter(phase)
    on_gpu.watch.device_ended()
    exposed = on_gpu.watch.totals_us
    assert all(on_gpu.watch.beside_us[phase] > 0 for phase in (Phase.DECODE, Phase.DECIDE))
    assert exposed[Phase.DECODE] == exposed[Phase.DECIDE] == 0
    launched.finish(has_slept=False)
    on_gpu.watch.enter(Phase.DECIDE)
    assert on_gpu.watch.totals_us[Phase.CHOOSE] > exposed[Phase.CHOOSE], "the result is read then"
