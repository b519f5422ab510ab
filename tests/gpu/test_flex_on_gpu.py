"""Attention split over the keys, as torch compiles it for a GPU and inside CUDA graphs."""

from pathlib import Path

import pytest
import torch

import engine.forward.flex_attention
from engine.checkpoint.model import load_model
from engine.forward.flex_attention import EVERY_LENGTH, FlexAttention
from engine.forward.graphs import GraphBackend
from engine.forward.lane_attention import LaneAttention
from engine.forward.masks import from_words
from engine.forward.operators import side_by_side
from engine.forward.split_attention import SplitAttention
from engine.forward.split_kernel import SplitKernel
from engine.layout.slots import LaneLayout
from engine.loading import make_executor
from tests.engine.flex_forms import always
from tests.engine.forward.test_fused import session_differences
from tests.engine.layout.test_lanes import check
from tests.engine.test_flex_programs import decode_differences, long_pair
from tests.gpu.test_engine_on_gpu import GPU, ROW_COUNTS, TOLERANCES
from tests.tiny_models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention be split at every length."""
    monkeypatch.setattr(engine.forward.flex_attention, "quickest", always("split"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128), (7, 64), (8, 128)])
def test_programs_agree_with_the_masked_form(group: int, dim: int, dtype: torch.dtype) -> None:
    lanes = LaneLayout(3, 5120)
    cache = torch.zeros(1, 2 * 2, lanes.total, dim, dtype=dtype, device=GPU)
    attention = LaneAttention(cache, lanes, group, dim**-0.5)
    for shape in ((1, 1), (1, 5), (1, 17), (2, 5)):
        attention.make_split(shape)  # which compares
    assert isinstance(attention._splits[0], SplitKernel)
    assert len(attention._splits[0].made) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128)])
def test_programs_of_torch_agree_with_the_masked_form(
    group: int, dim: int, dtype: torch.dtype
) -> None:
    keys, values = torch.randn(2, 1, 2, 3 * 5120, dim, dtype=dtype, device=GPU)
    flex = FlexAttention(5120, group, num_lanes=3)
    with torch.inference_mode():
        for shape in ((1, 5), (2, 5)):
            flex.make(shape, keys, values, dim**-0.5)  # which compares
    assert len(flex.made) == 2


@pytest.mark.parametrize("kind", [SplitKernel, FlexAttention])
def test_a_captured_program_goes_by_what_is_visible_when_it_is_replayed(
    kind: type[SplitAttention],
) -> None:
    flex = kind(4096, group=4)
    keys, values = torch.randn(2, 1, 8, 4096, 128, device=GPU, dtype=torch.bfloat16)
    query = torch.randn(1, 8, 20, 128, device=GPU, dtype=torch.bfloat16)
    words = torch.tensor([[100] * 5, [1, 3, 7, 15, 31]], device=GPU)
    with torch.inference_mode():
        flex.make((1, 5), keys, values, 0.1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flex.attend(
                query,
                keys,
                values,
                flex.see(words, torch.zeros(1, dtype=torch.int64, device=GPU)),
                0.1,
            )
        for prefix_len in (1, 64, 1000, 4000, 10):
            words[0] = prefix_len
            graph.replay()
            mask = from_words(words, 4096, torch.bfloat16).repeat_interleave(4, dim=2)
            want = side_by_side(query, keys, values, mask, 0.1)
            got = out.reshape(want.shape)
            assert float((got - want).abs().amax() / want.abs().amax()) < 0.03


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_sessions_get_the_logits_of_the_reference(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    folder = make_model(architecture, tmp_path, scale=0.5)
    reference, graphs = (
        make_executor(
            load_model(str(folder), dtype=dtype, device=GPU),
            400,
            backend=backend,
            row_counts=ROW_COUNTS,
        )
        for backend in ("reference", "graphs")
    )
    graphs.warm_up((1,))
    assert isinstance(graphs._backend, GraphBackend)
    lengths = [length for _, length in graphs._backend._recorded]
    assert lengths == [EVERY_LENGTH] * len(ROW_COUNTS)
    for seed in range(3):
        for error in session_differences(reference, graphs, seed=seed):
            assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_slots", [8192, 32_768])
def test_long_texts_get_the_logits_of_the_reference_in_the_form_that_is_chosen(
    num_slots: int, dtype: str, tmp_path: Path
) -> None:
    reference, graphs = long_pair(tmp_path, num_slots, GPU, dtype)
    graphs.warm_up(())
    for _, error in decode_differences(reference, graphs, seed=3, num_rounds=60):
        assert error < TOLERANCES[dtype]
    assert isinstance(graphs._backend, GraphBackend)
    if graphs._backend._split_from:
        assert graphs.num_uncaptured == 0


@pytest.mark.usefixtures("split")
def test_several_lanes_get_the_logits_of_texts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engine.layout.test_lanes.TOLERANCE", TOLERANCES["float32"])
    check(make_model("llama", tmp_path, scale=0.5), "graphs", (0, 1, 3, 2), GPU)
