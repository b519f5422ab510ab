"""The backend for GPUs where there is none: recordings of torch operators stand for CUDA graphs.

A recording has what a graph has: fixed addresses, fixed numbers, no Python when it runs again. What
only a GPU can show is in tests/gpu.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import engine.forward.graphs
from engine.checkpoint.model import load_model
from engine.errors import ModelError, OutOfMemory
from engine.executor import CAPTURED_AT_LOAD, ModelExecutor
from engine.forward.graphs import Compute, GraphBackend, captured_len
from engine.forward.masks import Masks, as_words, from_words
from engine.layout.slots import Feed
from engine.loading import make_executor
from engine.selfcheck import check_reproducible
from tests.engine.forward.test_fused import TOLERANCES, save, session_differences
from tests.engine.test_slot_cache import difference
from tests.tiny_models import make_model

ROW_COUNTS = (1, 2, 4)
NUM_SLOTS = 400


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let passes be recorded on the CPU; the list has the rows of each recording."""
    made: list[int] = []
    outputs: list[torch.Tensor] = []

    def record(compute: Compute, rows: torch.Tensor, *, is_warm: bool = False) -> Compute:
        made.append(rows.shape[1])
        there = rows.clone()
        # A recording knows no inference mode, in which its constants would have to be made.
        with torch.inference_mode(False), torch.no_grad():
            recorded = make_fx(compute)(there)

        written: list[torch.Tensor] = []

        def replay(rows: torch.Tensor) -> torch.Tensor:
            for result in outputs:  # what one recording writes, another one may use as scratch
                result.fill_(math.nan)
            there.copy_(rows)
            result = recorded(there)
            if not written:
                written.append(result.clone())
                outputs.append(written[0])
            return written[0].copy_(result)

        return replay

    monkeypatch.setattr(engine.forward.graphs, "RECORDED_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.graphs, "recorder", lambda _device: record)
    # Choices on a CPU are made on the host: nothing is left behind for other tests.
    monkeypatch.setattr(engine.forward.graphs, "capture_on", lambda *_: None)
    return made


def pair(folder: Path, dtype: str = "float32") -> tuple[ModelExecutor, ModelExecutor]:
    """The reference, and recordings."""
    reference = make_executor(load_model(str(folder), dtype=dtype), NUM_SLOTS, backend="reference")
    graphs = make_executor(
        load_model(str(folder), dtype=dtype), NUM_SLOTS, backend="graphs", row_counts=ROW_COUNTS
    )
    return reference, graphs


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_sessions_get_the_logits_of_the_reference_from_recordings(
    architecture: str, tmp_path: Path, recordings: list[int]
) -> None:
    # Passes of up to 6 rows: some are filled up, the largest run without a recording.
    reference, graphs = pair(save(architecture, tmp_path, {}))
    for seed in range(3):
        for error in session_differences(reference, graphs, seed=seed):
            assert error < TOLERANCES["float32"]
    assert set(recordings) == set(ROW_COUNTS)
    assert isinstance(graphs._backend, GraphBackend)
    assert len(graphs._backend._recorded) <= len(ROW_COUNTS) * 2  # 256 and 384 slots
    assert graphs.num_uncaptured > 0


def test_half_precision_stays_close_to_the_reference(tmp_path: Path, recordings: list[int]) -> None:
    folder = make_model("llama", tmp_path, scale=0.5)
    for error in session_differences(*pair(folder, "bfloat16"), seed=1):
        assert error < TOLERANCES["bfloat16"]


@pytest.mark.long
def test_all_common_shapes_are_recorded_at_load(tmp_path: Path, recordings: list[int]) -> None:
    _, graphs = pair(make_model("llama", tmp_path))
    graphs.warm_up((1,))
    recorded = len(recordings)
    for start in (0, 100, 255, 300, NUM_SLOTS - 8):
        for num_rows in (1, 2, 3, 4):
            where = tuple(range(start, start + num_rows))
            masks = tuple((2 << i) - 1 for i in range(num_rows))
            graphs.run(Feed((5,) * num_rows, where, where, start, masks), range(num_rows))
    assert len(recordings) == recorded
    assert graphs.num_uncaptured == 0
    assert captured_len(CAPTURED_AT_LOAD) == CAPTURED_AT_LOAD


def test_what_is_not_recorded_at_load_is_counted_and_may_fail(
    tmp_path: Path, recordings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, graphs = pair(make_model("llama", tmp_path))
    monkeypatch.setattr("engine.executor.CAPTURED_AT_LOAD", 256)
    graphs.warm_up(())
    backend = graphs._backend
    assert isinstance(backend, GraphBackend)

    def fails(*_: object, **__: object) -> Compute:
        raise RuntimeError("out of memory")

    where = tuple(range(300))
    for executor in (reference, graphs):
        executor.run(Feed((7,) * 300, where, where, 0, None), ())
    for _ in range(2):
        graphs.run(Feed((5,), (300,), (300,), 300, (1,)), (0,))
        assert graphs.num_uncaptured == 1
    backend._record = fails
    two = Feed((5, 6), (300, 301), (300, 301), 300, (1, 3))
    for number in (3, 4):
        assert difference(graphs.run(two, (0, 1)), reference.run(two, (0, 1))) < 1e-5
        assert graphs.num_uncaptured == number


@pytest.mark.parametrize(
    ("words", "kind", "advice"),
    [
        ("CUDA out of memory", OutOfMemory, "no memory .* lower --max-model-len"),
        ("operation not permitted", ModelError, "cannot be captured .* use the backend fused"),
    ],
)
def test_a_recording_that_fails_at_load_is_one_line(
    words: str,
    kind: type[ModelError],
    advice: str,
    tmp_path: Path,
    recordings: list[int],
) -> None:
    def fails(*_: object, **__: object) -> Compute:
        raise RuntimeError(words)

    _, graphs = pair(make_model("llama", tmp_path))
    backend = graphs._backend
    assert isinstance(backend, GraphBackend)
    backend._record = fails
    with pytest.raises(kind, match=advice) as caught:
        graphs.warm_up(())
    assert type(caught.value) is kind


def test_fixed_row_counts_are_reproducible(tmp_path: Path, recordings: list[int]) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    executor = make_executor(loaded, 192, backend="graphs", fixed_rows=4)
    check_reproducible(executor)
    assert set(recordings) == {4}


def test_lengths_grow_by_a_third_or_half() -> None:
    sizes = sorted({captured_len(n) for n in range(1, 40_000)})
    assert sizes[:5] == [256, 384, 512, 768, 1024]
    assert all(size % 64 == 0 for size in sizes)
    assert all(captured_len(n) >= n for n in range(1, 40_000))
    assert len(sizes) < 17


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_words_make_the_mask_that_the_host_would(dtype: torch.dtype) -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        num_rows, prefix_len = int(random.integers(1, 9)), int(random.integers(0, 150))
        masks = [int(x) for x in random.integers(0, 1 << 64, num_rows, dtype=np.uint64)]
        slots = range(prefix_len, prefix_len + num_rows)
        for bits in (masks, None):
            words = torch.tensor(as_words(slots, prefix_len, bits))
            wanted = Masks(dtype).build(torch.cat((words[:1].expand(3, -1), words)), 256)
            made = from_words(words, 256, dtype)
            assert made.dtype == dtype
            assert torch.equal(made, wanted)
            assert 0 < int((made == 0).sum()) < made.numel()


def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)))
    with pytest.raises(ModelError, match="CUDA graphs need a GPU; use the backend fused"):
        make_executor(loaded, 128, backend="graphs", row_counts=ROW_COUNTS)
