"""Attention split over the keys as torch compiles it, here for a CPU, against the reference.

What is compiled for a GPU is another kernel of the same source: see tests/gpu. Graphs are left out.
Errors are of logits, relative to the largest of their row; of outputs to the largest output.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path as Folder

import pytest
import torch

import engine.forward.flex_attention
import engine.forward.graphs
from engine.checkpoint.model import load_model
from engine.errors import ModelError
from engine.forward.flex_attention import FlexAttention, sees
from engine.forward.forward import HuggingFaceBackend
from engine.forward.graphs import GraphBackend
from engine.forward.lane_attention import LaneAttention
from engine.layout.slots import LaneLayout, Move, SlotMap
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from tests.engine.flex_forms import always, counted
from tests.engine.forward.test_fused import save, session_differences
from tests.engine.layout.test_lanes import CAPACITY, check
from tests.engine.random_session import Path, RandomSession
from tests.engine.test_slot_cache import difference
from tests.tiny_models import make_model

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)
TOLERANCE = 1e-5
NUM_ROWS = 6


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let all attention of captured passes be split; the list has the rows of each."""
    captured: list[int] = []
    monkeypatch.setattr(engine.forward.graphs, "RECORDED_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.graphs, "recorder", counted(captured))
    monkeypatch.setattr(engine.forward.graphs, "SPLIT_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.graphs, "COMPILING_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.flex_attention, "quickest", always("split"))
    return captured


def long_pair(
    folder: Folder, num_slots: int, device: str = "cpu", dtype: str = "float32"
) -> tuple[ModelExecutor, ModelExecutor]:
    """The reference and split passes of `NUM_ROWS`, over caches full of the same numbers."""
    options = {"max_position_embeddings": num_slots, "num_hidden_layers": 2}
    save("llama", folder, options)
    reference, graphs = (
        make_executor(
            load_model(str(folder), dtype=dtype, device=device),
            num_slots,
            backend=backend,
            row_counts=(NUM_ROWS,) if backend == "graphs" else (),
        )
        for backend in ("reference", "graphs")
    )
    assert isinstance(reference._backend, HuggingFaceBackend)
    assert isinstance(graphs._backend, GraphBackend)
    (buffer,) = reference._backend.cache.buffers.values()
    buffer.normal_()  # of each layer keys and then values, as in the other cache
    graphs._backend.cache[:, :, :num_slots] = buffer[:, 0].unflatten(0, (-1, 2)).flatten(1, 2)
    return reference, graphs


def decode_differences(
    reference: ModelExecutor, graphs: ModelExecutor, seed: int, num_rounds: int
) -> Iterator[tuple[int, float]]:
    """Run a session behind a long text whose keys and values are in both caches already.

    Yields the length of what each pass sees, and the largest difference.
    """
    slots: SlotMap[Path] = SlotMap(graphs.capacity)
    room = 4 * num_rounds + 100
    session = RandomSession(
        seed, slots, vocab=199, prompt_len=graphs.capacity - room, max_rows=NUM_ROWS
    )
    for step in session.steps(num_rounds):
        if isinstance(step, Move):
            reference.move(step)
            graphs.move(step)
        elif step.feed.masks is not None:
            ask = range(len(step.paths))
            got, want = graphs.run(step.feed, ask), reference.run(step.feed, ask)
            yield step.feed.total, difference(got, want)


@pytest.mark.long
def test_sessions_in_256_slots_get_the_logits_of_the_reference(
    tmp_path: Folder, made: list[int]
) -> None:
    folder = make_model("llama", tmp_path, scale=0.5)
    reference = make_executor(load_model(str(folder)), 256, backend="reference")
    graphs = make_executor(load_model(str(folder)), 256, backend="graphs", row_counts=(NUM_ROWS,))
    graphs.warm_up(())
    num_made = len(made)
    worst = max(
        error for seed in range(3) for error in session_differences(reference, graphs, seed)
    )
    assert worst < TOLERANCE
    assert len(made) == num_made


@pytest.mark.slow
def test_several_lanes_get_the_logits_of_texts_alone(tmp_path: Folder, made: list[int]) -> None:
    check(make_model("llama", tmp_path, scale=0.5), "graphs", (0, 1, 3, 2))


@pytest.mark.long
def test_lanes_of_other_lengths_side_by_side() -> None:
    # `make_split` compares random trees behind random keys.
    lanes = LaneLayout(3, CAPACITY)
    attention = LaneAttention(torch.zeros(1, 4, lanes.total, 16), lanes, group=2, scale=0.25)
    attention.make_split((3, 5))
    assert attention._splits[0].made == {(3, 5)}


@pytest.mark.long
def test_a_wrong_mask_is_caught_in_a_compiled_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(words: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
        return sees(words + 1, *where)

    monkeypatch.setattr(engine.forward.flex_attention, "sees", wrong)
    keys, values = torch.randn(2, 1, 2, CAPACITY, 16)
    with pytest.raises(ModelError, match="other numbers"), torch.inference_mode():
        FlexAttention(CAPACITY, group=2).make((1, 5), keys, values, 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [8192, 32_768])
def test_long_texts_get_the_logits_of_the_reference_from_one_recording(
    num_slots: int, tmp_path: Folder, made: list[int]
) -> None:
    reference, graphs = long_pair(tmp_path, num_slots)
    num_made = len(made)
    lengths = []
    for length, error in decode_differences(reference, graphs, seed=3, num_rounds=60):
        assert error < TOLERANCE
        lengths.append(length)
    assert len(made) == num_made
    assert max(lengths) > 0.9 * num_slots
    assert min(lengths) < 0.5 * num_slots  # texts start again from a part of themselves
