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
from engine.choice.coupling import chain_choice, chain_inputs
from engine.choice.logit_graphs import Compute, Record
from engine.choice.sampling import Sampling
from engine.errors import ModelError, OutOfMemory, RankError
from engine.forward.forward import HuggingFaceBackend
from engine.forward.graphs import GraphBackend
from engine.model_executor import ModelExecutor
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


Fails = Callable[[int, int, bool], RuntimeError | None]
"""(rank, number of the recording on it, whether it counts as warm) -> why it fails"""


class Tried:
    """In place of `graphs.recorder`: records as it does, unless it is to fail.

    asked  by rank, whether each recording that was tried counted as warm
    """

    def __init__(self, fails: Fails) -> None:
        self.here = threading.local()
        self.asked: dict[int, list[bool]] = {0: [], 1: []}
        self._fails = fails

    def __call__(self, device: torch.device) -> Record:
        inner = recorder(device)

        def record(compute: Compute, rows: torch.Tensor, *, is_warm: bool = False) -> Compute:
            asked = self.asked[self.here.rank]
            asked.append(is_warm)
            # Here a capture runs the sums, so that it can fail only afterwards.
            made = inner(compute, rows, is_warm=is_warm)
            why = self._fails(self.here.rank, len(asked) - 1, is_warm)
            if why is not None:
                raise why
            return made

        return record

    def run(self, loaded: LoadedModel, *, with_chain: bool = False) -> GraphBackend:
        """Make the recordings of one rank, in its thread."""
        assert loaded.rank is not None
        self.here.rank = loaded.rank.index
        executor = ModelExecutor(loaded, CAPACITY, backend="graphs", row_counts=ROW_COUNTS)
        backend = executor._backend
        assert isinstance(backend, GraphBackend)
        if not with_chain:
            executor.warm_up((1,))
            return backend
        for length in (256, 128):
            sampling = Sampling()
            choice = chain_choice(sampling, num_valid=150)
            inputs = chain_inputs(sampling, 3, 1, range(1, 3), num_valid=150)
            steps = torch.zeros(6, len(inputs), dtype=torch.int64)
            where = torch.arange(2)
            steps[1, :2], steps[2, :2], steps[4, :2], steps[5] = where, where, 1, inputs
            executor._backend.chain(steps, num_visible=length, choice=choice)  # type: ignore[union-attr]
        return backend


def tried(fails: Fails, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tried, Parts]:
    made = Tried(fails)
    monkeypatch.setattr(engine.forward.graphs, "recorder", made)
    return made, Parts(make_model("olmo", folder), monkeypatch)


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


def test_if_one_rank_has_no_memory_for_a_recording_all_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(rank: int, number: int, is_warm: bool) -> RuntimeError | None:  # noqa: FBT001
        return NO_MEMORY if (rank, number) == (1, 1) else None

    made, parts = tried(fails, tmp_path, monkeypatch)

    def refused(loaded: LoadedModel) -> str:
        with pytest.raises(OutOfMemory, match="lower --max-model-len") as error:
            made.run(loaded)
        return str(error.value)

    first, second = parts.run(refused)
    assert "on another rank" in first
    assert "CUDA out of memory" in second
    assert made.asked[0] == made.asked[1] == [False, False]


def test_if_one_rank_needs_a_second_try_all_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(rank: int, number: int, is_warm: bool) -> RuntimeError | None:  # noqa: FBT001
        return RuntimeError("a library prepares a kernel") if rank == 1 and is_warm else None

    made, parts = tried(fails, tmp_path, monkeypatch)

    def run(loaded: LoadedModel) -> set[object]:
        assert loaded.rank is not None
        made.here.rank = loaded.rank.index
        executor = ModelExecutor(loaded, 600, backend="graphs", row_counts=(1,))
        executor.warm_up((1,))
        backend = executor._backend
        assert isinstance(backend, GraphBackend)
        return set(backend._recorded)

    first, second = parts.run(run)
    assert first == second
    assert len(first) > 1
    assert made.asked[0] == made.asked[1] == [False, *(True, False) * (len(first) - 1)]


def test_a_chain_that_one_rank_cannot_record_none_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(rank: int, number: int, is_warm: bool) -> RuntimeError | None:  # noqa: FBT001
        return NO_MEMORY if (rank, number) == (1, 0) else None

    made, parts = tried(fails, tmp_path, monkeypatch)
    first, second = parts.run(lambda loaded: set(made.run(loaded, with_chain=True)._chains))
    assert first == second
    assert [length for _, length, _ in first] == [128]


def test_a_rank_without_memory_in_a_run_that_others_wait_for_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, parts = tried(
        lambda *_: engine.forward.graphs.RanShort("CUDA out of memory"), tmp_path, monkeypatch
    )

    def refused(loaded: LoadedModel) -> None:
        with pytest.raises(RankError, match="out of memory"):
            made.run(loaded)

    parts.run(refused)
