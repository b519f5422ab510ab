"""Products of few rows on a GPU: the kernels, how they are timed, and recorded passes with them."""

import logging
from pathlib import Path

import pytest
import torch
import torch._inductor.metrics
import torch.nn.functional as F

import engine.forward.graphs
from engine.checkpoint.model import load_model
from engine.forward import few_rows
from engine.forward.few_rows import FewRows, FewRowsProduct, Form, num_parts
from engine.forward.operators import TOLERANCES as OF_NUMBERS
from engine.forward.small_operators import SmallOperators
from engine.loading import make_executor
from tests.engine.flex_forms import always
from tests.engine.forward.test_few_rows import ROWS
from tests.engine.forward.test_fused import save, session_differences
from tests.engine.forward.test_small_operators import fused_in
from tests.gpu.test_engine_on_gpu import GPU, ROW_COUNTS, TOLERANCES
from tests.tiny_models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# The inputs of the matrices of models of one and of eight billion parameters, and odd sizes.
SIZES = [(3072, 2048), (2048, 8192), (1024, 4096), (1024, 14336), (100, 300), (37, 33)]
DTYPES = [torch.bfloat16, torch.float32]


def weights(
    sizes: tuple[int, int], dtype: torch.dtype, *, bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(sum(sizes))
    weight = (torch.randn(sizes, device=GPU) * sizes[1] ** -0.5).to(dtype)
    return weight, torch.randn(sizes[0], device=GPU).to(dtype) if bias else None


@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_that_are_chosen_by_timing_are_those_of_torch(
    dtype: torch.dtype, sizes: tuple[int, int], bias: int
) -> None:
    weight, biases = weights(sizes, dtype, bias=bool(bias))
    product = FewRows().product(weight, biases, may_split=True)
    for num_rows in ROWS:
        x = torch.randn(num_rows, sizes[1], device=GPU).to(dtype)
        got, want = x if product is None else product(x), F.linear(x, weight, biases)
        if product is not None:
            assert got.dtype == dtype
            assert (got - want).abs().max() <= OF_NUMBERS[dtype] * want.abs().max()


@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_form_gives_the_numbers_of_torch(sizes: tuple[int, int], bias: int) -> None:
    if torch.cuda.get_device_properties(GPU).shared_memory_per_block_optin < 120 << 10:
        pytest.skip("too little shared memory for some of the forms")
    weight, biases = weights(sizes, torch.bfloat16, bias=bool(bias))
    forms = few_rows._forms()
    assert forms
    for form in forms:
        for num_rows in (n for n in ROWS if n <= form.most_rows):
            x = torch.randn(num_rows, sizes[1], device=GPU).to(torch.bfloat16)
            assert few_rows._is_right(form, x, weight, biases), (form.name, num_rows)


def test_timing_leaves_no_memory_behind_and_gives_plausible_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="engine.forward.few_rows")
    timed, seconds = [], few_rows._seconds
    monkeypatch.setattr(few_rows, "_seconds", lambda *of: timed.append(seconds(*of)) or timed[-1])
    weight, _ = weights((2048, 2048), torch.bfloat16, bias=False)
    FewRows().product(weight, None, may_split=True)  # cuBLAS keeps its workspace
    before = torch.cuda.memory_allocated()
    FewRows().product(weight, None, may_split=True)
    assert torch.cuda.memory_allocated() == before
    fastest = weight.nbytes / 20e12  # of which no memory is capable
    assert all(fastest < one < 1e-3 for one in timed)
    assert caplog.text.count("products with weights [2048, 2048]: up to 1 rows: ") == 2


def always_ours(form: Form, x: torch.Tensor, *_: object) -> float:
    """In place of `few_rows._seconds`: split kernels are fastest, and all are faster than torch."""
    if form is few_rows.TORCH:
        return 9.0
    return 1.0 / form.split if len(x) > 1 or form.split > 1 else 0.9


def num_compiled() -> int:
    """How many variants of the kernels Triton has compiled or loaded in this process."""
    from engine.forward.few_rows_kernels import _dots, _sums

    return sum(len(caches[0]) for one in (_dots, _sums) for caches in one.device_caches.values())


@pytest.mark.parametrize("is_forced", [0, 1])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_recordings_with_products_of_few_rows_give_the_logits_of_the_reference(
    architecture: str,
    dtype: str,
    is_forced: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(engine.forward.graphs, "quickest", always("merged"))
    if is_forced:
        monkeypatch.setattr(few_rows, "_seconds", always_ours)
    if dtype == "float32":
        folder = save(architecture, tmp_path, {})
    else:
        folder = make_model(architecture, tmp_path, scale=0.5)
    loaded = load_model(str(folder), dtype=dtype, device=GPU)
    reference = make_executor(loaded, 400, backend="reference")
    loaded = load_model(str(folder), dtype=dtype, device=GPU)
    graphs = make_executor(loaded, 400, num_lanes=2, backend="graphs", row_counts=ROW_COUNTS)
    graphs.warm_up((1,))
    fused = fused_in(graphs)
    assert fused.is_merged
    if is_forced:
        for layer in fused._layers:
            assert isinstance(layer.qkv, FewRowsProduct)
            assert {num_parts(product, 4) for product in (layer.out, layer.down)} == {4}
    compiled = num_compiled()
    for seed in range(3):
        for error in session_differences(reference, graphs, seed=seed):
            assert error < TOLERANCES[dtype]
    assert num_compiled() == compiled


@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_partial_sums_are_added_by_the_kernel_of_the_norm(num_rows: int, split: int) -> None:
    torch._dynamo.reset()
    torch._inductor.metrics.reset()
    with torch.inference_mode():
        hidden = torch.randn(num_rows, 2048, device=GPU).bfloat16()
        parts = torch.randn(split, num_rows, 2048, device=GPU)
        weight = torch.randn(2048, device=GPU).bfloat16()
        total, _ = SmallOperators(1e-5).add_and_norm(hidden, parts, weight)
        want = hidden + parts.sum(0).bfloat16()
        assert (total - want).abs().max() <= OF_NUMBERS[torch.bfloat16] * want.abs().max()
    assert torch._inductor.metrics.generated_kernel_count == 1
