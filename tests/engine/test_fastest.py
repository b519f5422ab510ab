"""The number type of a drafter is the one that takes least time."""

from pathlib import Path

import pytest
import torch

import engine.fastest
from engine.device import cpu_is_fast_in
from engine.executor import Executor
from engine.fastest import fastest_dtype
from engine.prepare import make_executor
from tests.tiny_models import make_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(make_model("llama", tmp_path / "model", dtype=torch.bfloat16))


@pytest.mark.parametrize("quick", [torch.bfloat16, torch.float32])
def test_the_quicker_type_wins(
    model: str, quick: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu_is_fast_in(torch.bfloat16):
        pytest.skip("this CPU has no bfloat16 arithmetic")
    timed = []

    def seconds(executor: Executor) -> float:
        timed.append(executor.loaded.dtype)
        return 1.0 if executor.loaded.dtype == quick else 2.0

    monkeypatch.setattr(engine.fastest, "_seconds_of_a_row", seconds)
    name = fastest_dtype(model, revision=None, device="cpu", make_executor=make_executor)
    assert name == ("auto" if quick == torch.bfloat16 else "float32")
    assert timed == [torch.bfloat16, torch.float32]


def test_of_one_type_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.fastest, "_seconds_of_a_row", None)
    model = str(make_model("llama", tmp_path / "model"))
    name = fastest_dtype(model, revision=None, device="cpu", make_executor=make_executor)
    assert name == "auto"


def test_a_large_model_stays_as_its_checkpoint(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.fastest, "MAX_PARAMETERS", 10)
    monkeypatch.setattr(engine.fastest, "_seconds_of_a_row", None)
    name = fastest_dtype(model, revision=None, device="cpu", make_executor=make_executor)
    assert name == "auto"


def test_the_time_of_a_row_is_measured(model: str) -> None:
    executors = []

    def make(loaded: object, capacity: int) -> Executor:
        executors.append(make_executor(loaded, capacity))  # type: ignore[arg-type]
        return executors[-1]

    assert fastest_dtype(model, revision=None, device="cpu", make_executor=make) in (
        "auto",
        "float32",
    )
    assert all(0 < engine.fastest._seconds_of_a_row(one) < 1 for one in executors)
