"""`profile` tells of the texts that it measured, and not of what came before them."""

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.api.config import SpeculationConfig
from coordinator.api.params import SamplingParams
from coordinator.text.metrics import Simulated
from lab.measure import shares
from proto.messages import Role
from proto.stopwatch import Phase


class SlowPair:
    """A pair on a simulated target: each text takes 100 ms and 10 forwards, the first one longer.

    The node has worked for a second before, and was late all the time.
    """

    def __init__(self) -> None:
        self.num_texts = 0
        self.target = SimpleNamespace(hello=True, progress=500, num_uncaptured=3)
        self.late_ms = 1000.0
        self._watch = SimpleNamespace(totals_us=(0,) * len(Phase))
        self._count_us(1_000_000)
        of = {Role.TARGET: self.target, Role.DRAFTER: None}.get
        self.service = SimpleNamespace(registry=SimpleNamespace(of=of), watch=self._watch)

    def _count_us(self, model_us: int) -> None:
        self.target.times_us = tuple(model_us * (phase is Phase.MODEL) for phase in Phase)
        self.target.beside_us = (0,) * len(Phase)

    def generate(self, *_: Any) -> tuple[Any, None]:
        self.num_texts += 1
        self.target.progress += 10
        self.late_ms += 2.0 if self.num_texts > 1 else 700.0
        self._count_us(1_000_000 + 80_000 * self.num_texts)
        metrics = SimpleNamespace(
            num_target_passes=10,
            elapsed_s=0.1,
            num_tokens=10,
            num_accepted_tokens=0,
            no_model_ms_per_pass=1.0,
            host_ms_per_pass=1.0,
            drafter_lost_at=None,
        )
        return Stream(metrics), None

    def simulated(self) -> Simulated:
        number = self.target.progress
        return Simulated(8.0, 0.0, 0.0, 0.0, (), 0, number, number // 2, self.late_ms)


class Stream:
    """A text that is complete."""

    def __init__(self, metrics: Any) -> None:
        self.result = SimpleNamespace(metrics=metrics)

    def __iter__(self) -> Any:
        return iter(())


def test_only_the_measured_texts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    pair: Any = SlowPair()
    found = shares.profile(pair, [(1,), (2,)], SpeculationConfig(policy="ar"), SamplingParams())
    assert found.simulated is not None
    assert (found.simulated.num_forwards, found.simulated.elapsed_ms) == (20, 200.0)
    assert found.simulated.late_ms == pytest.approx(4.0)
    assert "by 2.0% of the time" in found.simulated.verdict
    target = found.shares[0]
    assert (target.number, target.num_uncaptured) == (20, 0)
    assert target.ms["model"] == pytest.approx(8.0)
    assert target.ms["wait"] == pytest.approx(2.0)
    assert target.beside_ms == {}


class PairOnDevice(SlowPair):
    """The same where a device runs the model: of 8 ms the host has decided for 3 and sent for 1,
    and between two passes it decides for 0.5 more."""

    def _count_us(self, model_us: int) -> None:
        exposed = {Phase.DECIDE: model_us // 16}
        beside = {
            Phase.WAIT: model_us * 3 // 8,
            Phase.MODEL: model_us // 8,
            Phase.DECIDE: model_us * 3 // 8,
            Phase.SEND: model_us // 8,
        }
        self.target.times_us = tuple(exposed.get(phase, 0) for phase in Phase)
        self.target.beside_us = tuple(beside.get(phase, 0) for phase in Phase)


def test_host_work_under_a_forward_is_part_of_the_model_and_all_adds_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    pair: Any = PairOnDevice()
    found = shares.profile(pair, [(1,), (2,)], SpeculationConfig(policy="ar"), SamplingParams())
    target, coordinator = found.shares
    busy = {phase: ms for phase, ms in target.ms.items() if ms}
    assert busy == pytest.approx({"model": 8.0, "decide": 0.5, "wait": 1.5})
    assert sum(target.ms.values()) == pytest.approx(10.0)  # each pass takes a tenth of 100 ms
    assert {phase: ms for phase, ms in target.beside_ms.items() if ms} == pytest.approx(
        {"decide": 3.0, "send": 1.0}
    )
    assert coordinator.beside_ms == {}
