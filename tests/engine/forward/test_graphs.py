"""The backend for GPUs where there is none: recordings of torch operators stand for CUDA graphs.

A recording has what a graph has: fixed addresses, fixed numbers, no Python when it runs again. What
only a GPU can show is in tests/gpu.
"""

import math
import re
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import engine.forward.graphs
from engine.checkpoint.model import load_model
from engine.errors import ModelError, OutOfMemory
from engine.forward import operators
from engine.forward.graphs import Compute, GraphBackend, captured_len
from engine.forward.masks import Masks, as_words, from_words
from engine.layout.slots import Feed
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
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

    # For each operator torch would note the whole stack of calls, which takes half of the time.
    monkeypatch.setattr(traceback, "extract_stack", lambda *_, **__: [])
    monkeypatch.setattr(engine.forward.graphs, "RECORDED_DEVICES", ("cpu",))
    monkeypatch.setattr(operators, "tiled_product", lambda *_: None)  # no operator of torch
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


def test_the_longest_is_recorded_first_and_people_are_told_how_far_it_is(
    tmp_path: Path, recordings: list[int]
) -> None:
    _, graphs = pair(make_model("llama", tmp_path))
    backend = graphs._backend
    assert isinstance(backend, GraphBackend)
    backend._recorded.clear()
    said: list[str] = []
    graphs.warm_up((), say=said.append)
    made = list(backend._recorded)
    shapes = [(1, num_rows) for num_rows in reversed(ROW_COUNTS)]
    assert made == [(shape, length) for length in (448, 384, 256) for shape in shapes]
    assert said[:9] == [f"recording passes: {number} of 9" for number in range(9)]


def test_lengths_of_many_thousands_of_slots_are_recorded_at_load_too(
    tmp_path: Path, recordings: list[int]
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    graphs = make_executor(loaded, 5000, backend="graphs", row_counts=(1,))
    graphs.warm_up(())
    before = len(recordings), graphs.num_uncaptured
    for slot in (3, 700, 1500, 4095, 4097, 4999):
        graphs.run(Feed((5,), (3,), (slot,), slot, (1,)), (0,))
    assert (len(recordings), graphs.num_uncaptured) == before
    assert graphs.num_late == 0


def test_what_is_not_recorded_at_load_is_never_recorded_and_counted(
    tmp_path: Path, recordings: list[int]
) -> None:
    reference, graphs = pair(make_model("llama", tmp_path))
    graphs.warm_up(())
    backend = graphs._backend
    assert isinstance(backend, GraphBackend)
    del backend._recorded[(1, 1), 384]
    num_recorded = len(recordings)
    where = tuple(range(300))
    for executor in (reference, graphs):
        executor.run(Feed((7,) * 300, where, where, 0, None), ())
    one = Feed((5,), (300,), (300,), 300, (1,))
    for number in (1, 2):
        assert difference(graphs.run(one, (0,)), reference.run(one, (0,))) < 1e-5
        assert (graphs.num_uncaptured, graphs.num_late) == (number, 0)
    assert len(recordings) == num_recorded


def test_a_recording_after_load_is_counted_and_logged(
    tmp_path: Path, recordings: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    _, graphs = pair(make_model("llama", tmp_path))
    graphs.warm_up(())
    backend = graphs._backend
    assert isinstance(backend, GraphBackend)
    with caplog.at_level("INFO", logger="engine.forward.graphs"):
        backend._record(lambda there: there + 1, torch.zeros(1, 1, dtype=torch.int64))
    assert graphs.num_late == 1
    assert "recording 1 after load" in caplog.text


@pytest.mark.parametrize("capacity", [64, 100, 300, 361, 424])
def test_the_mask_of_a_gpu_has_a_width_that_its_kernels_take(
    capacity: int, tmp_path: Path, recordings: list[int]
) -> None:
    folder = make_model("llama", tmp_path)
    reference = make_executor(load_model(str(folder)), capacity, num_lanes=2, backend="reference")
    graphs = make_executor(
        *(load_model(str(folder)), capacity),
        num_lanes=2,
        backend="graphs",
        row_counts=(1, 4),
    )
    graphs.warm_up(())
    last = tuple(range(capacity - 3, capacity))
    for executor in (reference, graphs):
        where = tuple(range(last[0]))
        executor.run(Feed((7,) * len(where), where, where, 0, None, 1), ())
    feed = Feed((5, 6, 7), last, last, last[0], (1, 3, 7), 1)  # and a row that fills it up
    laid_out = graphs.lay_out([feed], [range(3)])
    assert laid_out.num_visible % 8 == 0
    assert difference(graphs.forward(laid_out).logits, reference.run(feed, range(3))) < 1e-5
    assert (graphs.num_uncaptured, graphs.num_late) == (0, 0)
    unseen = graphs.lanes.first_slot(1) + capacity
    cache = graphs._backend.cache  # type: ignore[union-attr]
    assert not cache[:, :, unseen : graphs.lanes.first_slot(1) + laid_out.num_visible].any()


LACKS = [
    ("CUDA out of memory", OutOfMemory, "no memory .* lower --max-model-len"),
    ("operation not permitted", ModelError, "cannot be captured .* use the backend fused"),
]


def let_recordings_fail(graphs: ModelExecutor, words: str, least_rows: int) -> None:
    """From now on no pass of so many rows or more can be recorded."""
    backend = graphs._backend
    assert isinstance(backend, GraphBackend)
    record = backend._record

    def failing(compute: Compute, rows: torch.Tensor, *, is_warm: bool = False) -> Compute:
        if rows.shape[1] >= least_rows:
            raise RuntimeError(words)
        return record(compute, rows, is_warm=is_warm)

    backend._record = failing


@pytest.mark.parametrize(("words", "kind", "advice"), LACKS)
def test_a_recording_that_fails_before_the_weights_are_repacked_is_one_line(
    words: str, kind: type[ModelError], advice: str, tmp_path: Path, recordings: list[int]
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)))
    graphs = ModelExecutor(loaded, NUM_SLOTS, backend="graphs", row_counts=ROW_COUNTS)
    let_recordings_fail(graphs, words, 1)
    with pytest.raises(kind, match=advice) as caught:
        graphs.warm_up(())
    assert type(caught.value) is kind


def test_a_recording_that_fails_ends_the_load_of_a_reproducible_model(
    tmp_path: Path, recordings: list[int]
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)))
    graphs = make_executor(loaded, NUM_SLOTS, backend="graphs", fixed_rows=4)
    let_recordings_fail(graphs, "CUDA out of memory", 1)
    graphs.set_total(300)
    with pytest.raises(OutOfMemory, match="no memory"):
        graphs.warm_up(())


@pytest.mark.parametrize(("words", "_kind", "advice"), LACKS)
def test_passes_whose_recording_fails_once_the_weights_are_repacked_run_kernel_by_kernel(
    words: str,
    _kind: type[ModelError],
    advice: str,
    tmp_path: Path,
    recordings: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    reference, graphs = pair(make_model("llama", tmp_path))
    backend = graphs._backend
    assert isinstance(backend, GraphBackend)
    backend.forget()
    let_recordings_fail(graphs, words, 4)
    graphs.warm_up(())
    (warning,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert re.search("1 x 4 rows are not recorded: .*" + advice, warning.getMessage())
    assert graphs.num_uncaptured == 0  # of texts
    num_recorded = len(recordings)
    where = tuple(range(300))
    for executor in (reference, graphs):
        executor.run(Feed((7,) * 300, where, where, 0, None), ())
    for num_rows, num_uncaptured in ((1, 0), (2, 0), (3, 1), (4, 2)):
        where = tuple(range(300, 300 + num_rows))
        step = Feed(
            (5,) * num_rows, where, where, 300, tuple((2 << i) - 1 for i in range(num_rows))
        )
        laid_out = graphs.lay_out([step], [range(num_rows)])
        logits = graphs.forward(laid_out).logits
        is_refused = num_rows > 2
        if is_refused:
            assert logits.data_ptr() == backend._logits.data_ptr()  # where recorded choices read
        assert difference(logits, reference.run(step, range(num_rows))) < 1e-5
        assert (graphs.num_uncaptured, graphs.num_late) == (num_uncaptured, 0)
    assert len(recordings) == num_recorded


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
