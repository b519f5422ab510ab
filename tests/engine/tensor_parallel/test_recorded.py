"""Models that transformers runs, divided among ranks and recorded as graphs.

Each rank is a thread with a played GPU of its own (`stand_in.py`). What the ranks add up is an
operator, so that a recording has it, as one of NCCL's is in a CUDA graph.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.forward.graphs
from engine.checkpoint.model import LoadedModel, load_model
from engine.choice.logit_graphs import Compute, Record
from engine.errors import ModelError
from engine.executor import ModelExecutor
from engine.forward.forward import HuggingFaceBackend
from engine.forward.graphs import GraphBackend
from engine.tensor_parallel.group import Rank
from tests.engine.forward.test_fused import TOLERANCES, session_differences
from tests.engine.stand_in import Graph, StandIn, _Capture, _FromHost, _Refusing
from tests.engine.tensor_parallel.threads import Threads
from tests.tiny_models import make_model

CAPACITY, ROW_COUNTS = 200, (1, 4)
FAMILIES = ("qwen3_moe", "olmo", "granite", "cohere")
_adders: dict[int, Callable[[torch.Tensor], None]] = {}  # by rank
_library = torch.library.Library("test_ranks", "DEF")
_library.define("add_up(Tensor(a!) tensor, int rank) -> ()")
_library.impl("add_up", lambda tensor, rank: _adders[rank](tensor), "CPU")


def _operator(index: int) -> Callable[[torch.Tensor], None]:
    return lambda tensor: torch.ops.test_ranks.add_up(tensor, index)


def recorder(_: torch.device) -> Record:
    """In place of `graphs.recorder`: a recording runs the operators that the thread has seen."""
    played = StandIn()

    def record(compute: Compute, rows: torch.Tensor, *, is_warm: bool = False) -> Compute:
        graph, there = Graph(played), rows.clone()
        compute(there)
        with _Capture(graph), _FromHost():
            result = compute(there)

        def replay(rows: torch.Tensor) -> torch.Tensor:
            there.copy_(rows)
            graph.replay()
            return result

        return replay

    return record


@contextlib.contextmanager
def refusing_to_wait() -> Iterator[None]:
    """In place of `device.refusing_to_wait`, for one thread."""
    with _Refusing(), _FromHost():
        yield


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.forward.graphs, "RECORDED_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.graphs, "recorder", recorder)
    monkeypatch.setattr(engine.forward.graphs, "refusing_to_wait", refusing_to_wait)
    monkeypatch.setattr(engine.forward.graphs, "capture_on", lambda *_: None)


class Parts(Threads):
    """A model that is divided among two ranks; their sums can be recorded."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def rank(index: int, count: int, add_up: Callable[[torch.Tensor], None]) -> Rank:
            _adders[index] = add_up
            return Rank(index, count, _operator(index))

        monkeypatch.setattr("tests.engine.tensor_parallel.threads.Rank", rank)
        super().__init__(folder, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_parts_give_the_logits_of_the_whole(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(family, tmp_path, scale=0.5)
    # Here, because transformers loads in one thread at a time.
    wholes = [ModelExecutor(load_model(str(folder), dtype="float32"), CAPACITY) for _ in range(2)]
    parts = Parts(folder, monkeypatch)

    def errors(loaded: LoadedModel) -> list[float]:
        assert loaded.rank is not None
        executor = ModelExecutor(loaded, CAPACITY, backend="graphs", row_counts=ROW_COUNTS)
        executor.take_over()
        executor.warm_up((1,))
        backend = executor._backend
        assert isinstance(backend, GraphBackend)
        assert isinstance(backend._inner, HuggingFaceBackend)
        found = list(session_differences(wholes[loaded.rank.index], executor, 1, max_rows=4))
        assert backend._recorded
        return found

    num_sums = parts.num_sums
    for found in parts.run(errors):
        assert max(found) < 2 * TOLERANCES["float32"]
    assert parts.num_sums > num_sums


def test_a_pass_that_makes_one_rank_wait_is_recorded_on_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(make_model("olmo", tmp_path), monkeypatch)
    here = threading.local()
    compute = HuggingFaceBackend.compute_recorded

    def waits(self: HuggingFaceBackend, *about: Any) -> Any:
        out = compute(self, *about)
        if here.rank == 1:
            out.logits.nonzero()
        return out

    monkeypatch.setattr(HuggingFaceBackend, "compute_recorded", waits)

    def refused(loaded: LoadedModel) -> str:
        assert loaded.rank is not None
        here.rank = loaded.rank.index
        with pytest.raises(ModelError, match="cannot be recorded") as error:
            ModelExecutor(loaded, CAPACITY, backend="graphs", row_counts=ROW_COUNTS)
        return str(error.value)

    first, second = parts.run(refused)
    assert "on another rank" in first
    assert "nonzero" in second
