"""The merged operators of passes on a CPU give the numbers of torch's, and are used."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import engine.forward.fused
from engine import cpu_library
from engine.checkpoint.families import FUSED
from engine.checkpoint.model import load_model
from engine.cpu_library import library, why_not_here
from engine.device import cpu_is_fast_in
from engine.forward.cpu_layers import CpuLayers
from engine.forward.cpu_operators import CpuOperators
from engine.forward.forward import LAST
from engine.forward.fused import FusedBackend
from engine.layout.slots import Feed, LaneLayout, with_near
from engine.loading import make_executor
from engine.quantised.cpu_products import TiledProduct
from tests.engine.forward.test_fused import TOLERANCES, session_differences
from tests.tiny_models import make_model

# Of one operator: the order of sums in float32; a last digit of bfloat16.
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
EPSILON = 1e-6
SIZES = (64, 100, 896)


@pytest.fixture(autouse=True)
def _library() -> None:
    if (why := why_not_here()) is not None:
        pytest.skip(why)
    assert library() is not None


def some(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operators(dtype: torch.dtype) -> CpuOperators:
    found = engine.forward.fused.operators(dtype, EPSILON)
    assert found is not None
    return found


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want.double()).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_a_sum_and_its_norm_are_those_of_torch(dtype: torch.dtype) -> None:
    for size in SIZES:
        hidden, change, weight = (some(5, size, seed=i).to(dtype) for i in range(3))
        total = hidden + change
        want = F.rms_norm(total.double(), (size,), weight[0].double(), EPSILON)
        normed = operators(dtype).add_and_norm(hidden, change, weight[0])
        assert torch.equal(hidden, total)
        assert error(normed, want) < NEAR[dtype]
        assert torch.equal(operators(dtype).add_and_norm(hidden, None, weight[0]), normed)
        assert torch.equal(hidden, total)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_a_gate_is_that_of_torch(dtype: torch.dtype) -> None:
    for size in SIZES:
        both = (30 * some(3, 2 * size)).to(dtype)
        both[0, :6] = torch.tensor([0, -200, 200, math.nan, math.inf, -1e-20])
        gates, ups = both.chunk(2, dim=-1)
        found, want = operators(dtype).gate(both), F.silu(gates).mul_(ups)
        assert torch.equal(found.isnan(), want.isnan())
        near = dict.fromkeys(("rtol", "atol"), NEAR[dtype])
        torch.testing.assert_close(found, want, equal_nan=True, **near)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("dim", [16, 40, 128])
def test_heads_are_normed_and_turned_and_written(
    dim: int, dtype: torch.dtype, *, has_norms: bool
) -> None:
    count, heads, kv_heads = 5, 6, 2
    qkv = some(count, (heads + 2 * kv_heads) * dim).to(dtype)
    cos, sin = some(2, count, 1, dim, seed=4).to(dtype).unbind()
    weights = some(heads + 2 * kv_heads, dim, seed=5).to(dtype) if has_norms else None
    cache = torch.zeros(2 * kv_heads, 9, dim, dtype=dtype)
    slots, queries = torch.tensor([3, 8, 0, 1, 7]), torch.zeros_like(qkv)
    operators(dtype).turn_and_write(qkv, weights, cos, sin, slots, queries, cache)
    parts = qkv.view(count, -1, dim)
    turned = parts[:, : heads + kv_heads]
    if weights is not None:
        normed = F.rms_norm(turned.float(), (dim,), None, EPSILON) * weights[: heads + kv_heads]
        turned = normed.to(dtype)
    swapped = torch.cat((turned[..., dim // 2 :], turned[..., : dim // 2]), dim=-1)
    turned = turned * cos + swapped * sin
    assert error(queries.view(count, -1, dim)[:, :heads], turned[:, :heads]) < 2 * NEAR[dtype]
    assert error(cache[:kv_heads, slots], turned[:, heads:].transpose(0, 1)) < 2 * NEAR[dtype]
    assert torch.equal(cache[kv_heads:, slots], parts[:, heads + kv_heads :].transpose(0, 1))
    assert not cache[:, [2, 4, 5, 6]].any()


@pytest.mark.parametrize("quantization", ["", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*FUSED, "qwen3_wide", "mistral_window"])
def test_passes_with_them_get_the_logits_of_the_reference(
    family: str, dtype: str, quantization: str, tmp_path: Path
) -> None:
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic")
    folder = str(make_model(family, tmp_path, 0, scale=0.5))
    load = partial(load_model, folder, dtype=dtype, quantization=quantization)
    reference = make_executor(load(), 320, backend="reference")
    fused = make_executor(load(), 320, backend="auto")
    assert isinstance(fused._backend, FusedBackend)
    layers = fused._backend._cpu_layers
    assert layers is not None
    assert layers.is_one_call
    for difference in session_differences(reference, fused, seed=1):
        assert difference < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*FUSED, "qwen3_wide", "mistral_window"])
def test_layers_in_one_call_are_their_steps_one_by_one(
    family: str, dtype: str, tmp_path: Path
) -> None:
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic")
    folder = str(make_model(family, tmp_path, 0, scale=0.5))
    executor = make_executor(load_model(folder, dtype=dtype), 64, num_lanes=2)
    backend = executor._backend
    assert isinstance(backend, FusedBackend)
    layers = backend._cpu_layers
    assert layers is not None
    in_one_call = layers._run_ours
    assert in_one_call is not None
    # Of 20 rows and one, the longer lane alone has a second part.
    for counts in ((1,), (7,), (40,), (1, 1), (5, 2), (20, 1)):
        feeds = [
            with_near(Feed.chain(lane, n, 199), executor.windows) for lane, n in enumerate(counts)
        ]
        step, found = executor.lay_out(feeds, [range(n) for n in counts]), []
        for layers._run_ours in (None, in_one_call):
            backend.cache.zero_()
            out = executor.forward(step, (1, LAST))
            assert out.features is not None
            found.append((out.logits, out.features, backend.cache.clone()))
        for one_by_one, together in zip(*found, strict=True):
            assert one_by_one.any()
            assert torch.equal(one_by_one, together)


def test_an_operator_that_errs_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CpuLayers, "_one_call", lambda *_: None)  # the steps are called one by one
    monkeypatch.setattr(CpuOperators, "gate", lambda _, both: both.chunk(2, dim=-1)[0].clone())
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    backend = FusedBackend(loaded, LaneLayout(1, 64))
    backend.take_over()
    assert backend._cpu_layers is None
    assert "our own operators give other logits" in caplog.text
    assert not backend.cache.any()


def test_a_model_of_fewer_tokens_than_rows_is_tried_too(tmp_path: Path) -> None:
    loaded = load_model(str(make_model("llama", tmp_path, vocab=4, scale=0.5)), dtype="float32")
    backend = FusedBackend(loaded, LaneLayout(1, 64))
    backend.take_over()
    with torch.inference_mode():
        assert backend._try_pass(None, 9).isfinite().all()


def test_without_the_library_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_library, "_kept", lambda: None)
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    backend = FusedBackend(loaded, LaneLayout(1, 64))
    backend.take_over()
    assert backend._cpu_layers is None
    assert not isinstance(backend._head, TiledProduct)
