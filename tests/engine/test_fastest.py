"""The number type of a drafter, and the number of threads, are those that take least time."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import engine.fastest
import engine.loading
from engine.checkpoint.model import LoadedModel, load_model
from engine.device import cpu_is_fast_in
from engine.fastest import fastest_dtype, fastest_num_threads, usual_num_threads
from engine.loading import load_engine, make_executor
from engine.model_executor import ModelExecutor
from engine.timing import COMPARED_ROWS, Seconds
from tests.tiny_models import make_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(make_model("llama", tmp_path / "model", dtype=torch.bfloat16))


def unready(loaded: LoadedModel, _capacity: int) -> Any:
    """In place of an executor where no pass is run, so that no form is chosen for one."""
    return SimpleNamespace(loaded=loaded)


@pytest.mark.parametrize("quick", [torch.bfloat16, torch.float32])
def test_the_quicker_type_wins(
    model: str, quick: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu_is_fast_in(torch.bfloat16):
        pytest.skip("this CPU has no bfloat16 arithmetic")
    timed = []

    def seconds(executor: ModelExecutor) -> Seconds:
        timed.append(executor.loaded.dtype)
        return dict.fromkeys(COMPARED_ROWS, 1.0 if executor.loaded.dtype == quick else 2.0)

    monkeypatch.setattr(engine.fastest, "_seconds_by_rows", seconds)
    name = fastest_dtype(partial(load_model, model), device="cpu", make_executor=unready)
    assert name == ("auto" if quick == torch.bfloat16 else "float32")
    assert timed == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("slower_at", [0, *COMPARED_ROWS])
def test_float32_is_taken_only_if_it_is_slower_for_no_number_of_rows(
    slower_at: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu_is_fast_in(torch.bfloat16):
        pytest.skip("this CPU has no bfloat16 arithmetic")

    def seconds(executor: ModelExecutor) -> Seconds:
        if executor.loaded.dtype == torch.bfloat16:
            return dict.fromkeys(COMPARED_ROWS, 1.0)
        return {**dict.fromkeys(COMPARED_ROWS, 0.9), slower_at: 1.2}

    monkeypatch.setattr(engine.fastest, "_seconds_by_rows", seconds)
    name = fastest_dtype(partial(load_model, model), device="cpu", make_executor=unready)
    assert name == ("auto" if slower_at else "float32")


def test_of_one_type_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.fastest, "_seconds_by_rows", None)
    model = str(make_model("llama", tmp_path / "model"))
    name = fastest_dtype(partial(load_model, model), device="cpu", make_executor=make_executor)
    assert name == "auto"


def test_a_large_model_stays_as_its_checkpoint(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.fastest, "MAX_PARAMETERS", 10)
    monkeypatch.setattr(engine.fastest, "_seconds_by_rows", None)
    name = fastest_dtype(partial(load_model, model), device="cpu", make_executor=make_executor)
    assert name == "auto"


def test_the_time_of_a_row_is_measured(model: str) -> None:
    executors = []

    def make(loaded: object, capacity: int) -> ModelExecutor:
        executors.append(make_executor(loaded, capacity))  # type: ignore[arg-type]
        return executors[-1]

    assert fastest_dtype(partial(load_model, model), device="cpu", make_executor=make) in (
        "auto",
        "float32",
    )
    for one in executors:
        seconds = engine.fastest._seconds_by_rows(one)
        assert seconds.keys() == set(COMPARED_ROWS)
        assert all(0 < each < 1 for each in seconds.values())


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 4.0, 2: 2.0, 4: 1.0}, 4),
        ({1: 4.0, 2: 2.0, 4: 3.0}, 2),
        ({1: 1.0, 2: 0.99, 4: 0.98}, 1),  # alike: the others are left to whoever needs them
    ],
)
@pytest.mark.usefixtures("four_threads")
def test_as_many_threads_run_as_are_fastest(
    seconds: dict[int, float], expected: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(*_: object) -> float:
        return seconds[torch.get_num_threads()]

    monkeypatch.setattr(engine.fastest, "_steady_seconds", timed)
    assert fastest_num_threads(make_executor(load_model(model), 64)) == expected
    assert torch.get_num_threads() == 4


@pytest.mark.long
@pytest.mark.parametrize("fixed_rows", [None, 4])
@pytest.mark.usefixtures("four_threads")
def test_a_node_runs_with_them_but_where_no_clock_may_decide(
    fixed_rows: int | None, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.loading, "fastest_num_threads", lambda _: 3)
    monkeypatch.setattr(engine.loading, "usual_num_threads", lambda _: 2)
    monkeypatch.setattr(engine.loading, "may_be_exact", lambda *_: False)
    options = {"revision": None, "dtype": "float32", "device": "cpu", "max_len": 128}
    load_engine(model, **options, fixed_rows=fixed_rows, warm_rows=(1,), say=print)  # type: ignore[arg-type]
    assert torch.get_num_threads() == (3 if fixed_rows is None else 2)


@pytest.mark.usefixtures("four_threads")
def test_without_a_clock_a_small_model_has_one_thread(model: str) -> None:
    loaded = load_model(model)
    assert usual_num_threads(loaded) == 1
    assert usual_num_threads(replace(loaded, num_parameters=120_000_000)) == 3
    assert usual_num_threads(replace(loaded, num_parameters=8_000_000_000)) == 4


@pytest.mark.usefixtures("four_threads")
def test_a_token_is_timed_by_the_passes_that_will_run(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, counts = make_executor(load_model(model), 64), []
    run = executor.run

    def counted(*args: Any) -> torch.Tensor:
        counts.append(torch.get_num_threads())
        return run(*args)

    monkeypatch.setattr(executor, "run", counted)
    assert fastest_num_threads(executor) in counts
    assert set(counts) == {1, 2, 4}
