"""Which form of an operator runs is timed on rank 0, and is the same on all ranks."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.forward.flex_attention
import engine.forward.fused
import engine.forward.graphs
import engine.forward.lane_attention
import engine.forward.small_operators
import engine.timing
from engine.checkpoint.model import LoadedModel, load_model
from engine.choice.logit_graphs import Compute, Record
from engine.errors import ModelError
from engine.forward.forward import Shape
from engine.forward.fused import FusedBackend
from engine.forward.graphs import GraphBackend
from engine.model_executor import ModelExecutor
from engine.tensor_parallel.split import first_says
from engine.timing import Decide, Form, quickest
from tests.engine.flex_forms import counted, spelt_out
from tests.engine.forward.test_fused import TOLERANCES, session_differences
from tests.engine.tensor_parallel.threads import Threads
from tests.tiny_models import make_model

HERE = threading.local()
Quickest = Callable[..., str]


def by_rank(*places: int) -> Quickest:
    """In place of `quickest`: by rank, the form at that place is the fastest there."""

    def quickest(forms: Sequence[Form], decide: Decide, **_: object) -> str:
        names = [form.name for form in forms]
        return decide(names[places[HERE.rank]], names)

    return quickest


def laid_out(loaded: LoadedModel, backend: str, num_lanes: int = 1) -> ModelExecutor:
    """The executor of one rank, in its thread, with all forms chosen."""
    assert loaded.rank is not None
    HERE.rank = loaded.rank.index
    counts = (1, 4) if backend == "graphs" else ()
    executor = ModelExecutor(loaded, 400, backend=backend, row_counts=counts, num_lanes=num_lanes)
    executor.take_over()
    return executor


@pytest.mark.parametrize("steps_s", [(0.0, 1.0), (1.0, 0.0)])
def test_ranks_whose_clocks_differ_run_each_form_equally_often(
    steps_s: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run adds up over the ranks: one that ran more often would wait for ever."""

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            HERE.now += steps_s[HERE.rank]
            return float(HERE.now)

    monkeypatch.setattr(engine.timing, "time", Clock)
    monkeypatch.setattr("tests.engine.tensor_parallel.threads.LIMIT_S", 5.0)

    def num_runs(loaded: LoadedModel) -> int:
        assert loaded.rank is not None
        rank, runs = loaded.rank, []
        HERE.rank, HERE.now = rank.index, 0.0

        def run() -> None:
            rank.add_up(torch.ones(1))
            runs.append(rank.index)

        forms = [Form(name, "in one order", run) for name in ("one", "other")]
        quickest(forms, partial(first_says, rank=rank, device=loaded.device))
        return len(runs)

    first, second = Threads(make_model("llama", tmp_path), 2).run(num_runs)
    assert first == second > 0


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let passes count as captured, and their attention be split, on the CPU."""
    monkeypatch.setattr(engine.forward.graphs, "RECORDED_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.graphs, "recorder", counted([]))
    monkeypatch.setattr(engine.forward.graphs, "SPLIT_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.flex_attention, "_compiled", lambda: spelt_out)


def splits_of(executor: ModelExecutor) -> dict[Shape, int]:
    assert isinstance(executor._backend, GraphBackend)
    return executor._backend._split_from


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(("places", "is_split"), [((1, 0), True), ((0, 1), False)])
def test_what_is_quicker_on_the_first_rank_runs_on_all(
    places: tuple[int, int], *, is_split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.forward.flex_attention, "quickest", by_rank(*places))
    threads = Threads(make_model("llama", tmp_path), 2)
    for executor in threads.run(lambda loaded: laid_out(loaded, "graphs")):
        assert set(splits_of(executor)) == ({(1, 1), (1, 4)} if is_split else set())


@pytest.mark.usefixtures("captured")
def test_what_one_rank_cannot_compile_none_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.forward.flex_attention, "quickest", by_rank(1, 1))
    make = FusedBackend.make_split

    def fails_once(fused: FusedBackend, shape: Shape) -> None:
        if shape == (1, 4) and HERE.rank == 1:
            raise ModelError("no such kernel")
        make(fused, shape)

    monkeypatch.setattr(FusedBackend, "make_split", fails_once)
    threads = Threads(make_model("llama", tmp_path), 2)
    for executor in threads.run(lambda loaded: laid_out(loaded, "graphs")):
        assert set(splits_of(executor)) == {(1, 1)}


@pytest.mark.usefixtures("captured")
def test_ranks_with_split_attention_give_the_logits_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.forward.flex_attention, "quickest", by_rank(1, 0))
    folder = make_model("llama", tmp_path, scale=0.5)
    # Here, because transformers loads in one thread at a time.
    wholes = [ModelExecutor(load_model(str(folder), dtype="float32"), 400) for _ in range(2)]

    def errors(loaded: LoadedModel) -> list[float]:
        executor = laid_out(loaded, "graphs")
        return list(session_differences(wholes[HERE.rank], executor, seed=1))

    for found in Threads(folder, 2).run(errors):
        assert max(found) < 2 * TOLERANCES["float32"]


@pytest.fixture
def merging(captured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small operators of recorded passes be merged on the CPU, as plain functions."""
    monkeypatch.setattr(engine.forward.graphs, "MERGED_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.flex_attention, "quickest", by_rank(0, 0))
    monkeypatch.setattr(engine.forward.small_operators, "_compiled", lambda function: function)


@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize(("places", "is_merged"), [((1, 0), True), ((0, 1), False)])
def test_small_operators_are_merged_on_all_ranks_if_that_is_quicker_on_the_first(
    places: tuple[int, int], *, is_merged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.forward.graphs, "quickest", by_rank(*places))
    folder = make_model("qwen3", tmp_path, scale=0.5)
    # Here, because transformers loads in one thread at a time.
    wholes = [ModelExecutor(load_model(str(folder), dtype="float32"), 400) for _ in range(2)]

    def errors(loaded: LoadedModel) -> list[float]:
        executor = laid_out(loaded, "graphs")
        assert isinstance(executor._backend, GraphBackend)
        assert executor._backend._fused.is_merged is is_merged
        return list(session_differences(wholes[HERE.rank], executor, seed=1))

    for found in Threads(folder, 2).run(errors):
        assert max(found) < 2 * TOLERANCES["float32"]


@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize("step", ["make", "record"])
def test_what_one_rank_cannot_merge_none_merges(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.forward.graphs, "quickest", by_rank(1, 1))
    make, recorder = FusedBackend.make_merged, GraphBackend._recorder

    def makes(backend: FusedBackend, *args: Any) -> None:
        if HERE.rank == 1 and step == "make":
            raise ModelError("no such kernel")
        make(backend, *args)

    def recording(backend: GraphBackend) -> Record:
        right = recorder(backend)

        def record(compute: Compute, rows: torch.Tensor, *, is_warm: bool = False) -> Compute:
            assert backend._fused is not None
            if HERE.rank == 1 and backend._fused.is_merged and step == "record":
                raise RuntimeError("no such kernel")
            return right(compute, rows, is_warm=is_warm)

        return record

    monkeypatch.setattr(FusedBackend, "make_merged", makes)
    monkeypatch.setattr(GraphBackend, "_recorder", recording)
    for executor in Threads(make_model("llama", tmp_path), 2).run(
        lambda loaded: laid_out(loaded, "graphs")
    ):
        assert isinstance(executor._backend, GraphBackend)
        assert not executor._backend._fused.is_merged
