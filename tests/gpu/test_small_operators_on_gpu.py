"""The small operators of a layer, merged by torch's compiler for a GPU and inside CUDA graphs."""

from pathlib import Path

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.metrics

import engine.forward.graphs
from engine.checkpoint.families import FUSED as FAMILIES
from engine.checkpoint.model import load_model
from engine.forward import small_operators
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from tests.engine.flex_forms import always
from tests.engine.forward.test_fused import save, session_differences
from tests.engine.forward.test_small_operators import KERNELS, MISTAKES, Program, fused_in
from tests.gpu.test_engine_on_gpu import GPU, ROW_COUNTS, TOLERANCES
from tests.tiny_models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged operators are used wherever they are right."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(engine.forward.graphs, "quickest", always("merged"))


def graphs_of(folder: Path, dtype: str, num_lanes: int = 1) -> ModelExecutor:
    loaded = load_model(str(folder), dtype=dtype, device=GPU)
    return make_executor(loaded, 400, num_lanes=num_lanes, backend="graphs", row_counts=ROW_COUNTS)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_recordings_with_merged_operators_give_the_logits_of_the_reference(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    if dtype == "float32":
        folder = save(architecture, tmp_path, {})
    else:
        folder = make_model(architecture, tmp_path, scale=0.5)
    loaded = load_model(str(folder), dtype=dtype, device=GPU)
    reference = make_executor(loaded, 400, backend="reference")
    graphs = graphs_of(folder, dtype, num_lanes=2)
    graphs.warm_up((1,))
    assert fused_in(graphs).is_merged
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed in range(3):
        for error in session_differences(reference, graphs, seed=seed):
            assert error < TOLERANCES[dtype]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_compiler_makes_as_few_kernels_as_are_counted(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.forward.graphs, "SPLIT_DEVICES", ())  # it would be counted as well
    # Products without partial sums, for which `add_and_norm` would be compiled as well.
    monkeypatch.setattr("engine.forward.fused.FEW_ROWS_DEVICES", ())
    torch._inductor.metrics.reset()
    graphs = graphs_of(save(architecture, tmp_path, {"num_key_value_heads": 1}), "bfloat16")
    assert fused_in(graphs).is_merged
    # Each function for one row, and for several.
    assert 0 < torch._inductor.metrics.generated_kernel_count <= 2 * sum(KERNELS.values())


@pytest.mark.parametrize(
    ("name", "mistake"), [(name, several[0]) for name, several in MISTAKES.items()]
)
def test_a_mistake_in_a_merged_operator_is_found_at_load(
    name: str, mistake: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_operators, name, mistake)
    assert not fused_in(graphs_of(save("llama", tmp_path, {}), "float32")).is_merged
