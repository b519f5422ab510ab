"""The merged operators of passes on a CPU give the numbers of torch's, and are used."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import engine.forward.cpu_layers
import engine.forward.fused
from engine.checkpoint.families import FUSED
from engine.checkpoint.model import load_model
from engine.cpu_library import library, why_not_here
from engine.device import cpu_is_fast_in
from engine.forward.cpu_operators import CpuOperators, attention
from engine.forward.forward import LAST
from engine.forward.fused import FusedBackend
from engine.forward.operators import Seconds, side_by_side
from engine.layout.slots import LaneLayout, Span
from engine.loading import make_executor
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


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 24, 200])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128])
def test_attention_is_that_of_torch(dim: int, dtype: torch.dtype, num_rows: int) -> None:
    (attend,) = attention(dtype, dim).values()
    for num_keys in (1, 15, 16, 130):
        for lanes in (1, 2):
            cache = some(2, lanes, 3, 150, dim).to(dtype)
            keys, values = cache[:, :, :, :num_keys].unbind()
            query = some(lanes, 3, num_rows, dim, seed=8).to(dtype)
            hidden = some(lanes, 1, num_rows, num_keys, seed=9) < 0
            hidden[..., 0] = False
            mask = torch.zeros(hidden.shape, dtype=dtype)
            mask[hidden] = torch.finfo(dtype).min
            want = side_by_side(query.double(), keys.double(), values.double(), mask.double(), 0.3)
            assert error(attend(query, keys, values, mask, 0.3), want) < 2 * NEAR[dtype]


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("dim", [48, 64, 128])
def test_attention_of_a_row_is_the_same_bits_whatever_other_rows_there_are(
    dim: int, dtype: torch.dtype
) -> None:
    (attend,) = attention(dtype, dim).values()
    keys, values = some(2, 1, 2, 150, dim).to(dtype).unbind()
    query, mask = some(1, 2, 40, dim, seed=8).to(dtype), some(1, 1, 40, 150, seed=9).to(dtype)
    rows = [
        attend(query[:, :, i : i + 1], keys, values, mask[:, :, i : i + 1], 0.3) for i in range(40)
    ]
    for count in (2, 5, 16, 17, 40):
        out = attend(query[:, :, :count], keys, values, mask[:, :, :count], 0.3)
        assert torch.equal(out, torch.cat(rows[:count], dim=2))


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    (attend,) = attention(dtype, 64).values()
    query, keys, values = (some(1, 2, 3, 64, seed=i).to(dtype) for i in range(3))
    query[0, 0, 1, 5] = math.nan
    out = attend(query, keys, values, torch.zeros(1, 1, 3, 3, dtype=dtype), 0.3)
    assert out[0, 0, 1].isnan().all()
    out[0, 0, 1] = 0
    assert out.isfinite().all()


def always(name: str) -> Callable[..., str]:
    """A choice of this form wherever there is one of that name."""
    return lambda forms, *_: name if name in forms else next(iter(forms))


def always_fast(name: str) -> Callable[..., Mapping[str, Seconds]]:
    """Whole passes by this form take half of the time of others."""
    return lambda sets, row_counts: {
        one: dict.fromkeys(row_counts, 1.0 if one == name else 2.0) for one in sets
    }


@pytest.mark.parametrize("form", ["merged", "in one call"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*FUSED, "qwen3_wide"])
def test_passes_with_them_get_the_logits_of_the_reference(
    family: str, dtype: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic")
    monkeypatch.setattr(engine.forward.cpu_layers, "seconds_of_passes", always_fast(form))
    monkeypatch.setattr(engine.forward.lane_attention, "quickest", always("our own"))
    folder = str(make_model(family, tmp_path, 0, scale=0.5))
    # Weights of 8 bits, because for these there is no product but our own.
    load = partial(
        load_model, folder, dtype=dtype, quantization="int8" if form == "in one call" else ""
    )
    reference = make_executor(load(), 320, backend="reference")
    fused = make_executor(load(), 320, backend="auto")
    assert isinstance(fused._backend, FusedBackend)
    layers = fused._backend._cpu_layers
    assert layers is not None
    assert bool(layers.most_rows) == (form == "in one call")
    for difference in session_differences(reference, fused, seed=1):
        assert difference < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*FUSED, "qwen3_wide"])
def test_layers_in_fewer_calls_are_their_steps_one_by_one(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic")
    monkeypatch.setattr(engine.forward.cpu_layers, "seconds_of_passes", always_fast("in one call"))
    monkeypatch.setattr(engine.forward.lane_attention, "quickest", always("our own"))
    # Weights of 8 bits, because for these there is no product but our own.
    folder = str(make_model(family, tmp_path, 0, scale=0.5))
    loaded, lanes = load_model(folder, dtype=dtype, quantization="int8"), LaneLayout(2, 64)
    backend = FusedBackend(loaded, lanes)
    backend.take_over()
    layers = backend._cpu_layers
    assert layers is not None
    assert layers.most_rows == 16
    functions = layers._functions
    assert functions is not None
    random = torch.Generator().manual_seed(4)
    # A mask may begin some slots after a lane's first, as those of windows do.
    # Of 20 rows and one, the longer lane alone has a second part.
    every = (((1,), 0), ((7,), 2), ((40,), 0), ((1, 1), 0), ((5, 2), 0), ((20, 1), 0))
    for counts, num_skipped in every:
        num_rows, num_visible = sum(counts), max(counts) + 3
        spans = tuple(Span(lanes.first_slot(i), n) for i, n in enumerate(counts))
        places = torch.cat([torch.arange(n) for n in counts])
        first = torch.cat([torch.full((span.num_rows,), span.first_slot) for span in spans])
        rows = torch.stack((torch.arange(num_rows) * 5 % 199, places, places + first))
        mask = backend.cache.new_zeros(1, 1, num_rows, num_visible)
        is_hidden = torch.rand(num_rows, num_visible, generator=random) < 0.3
        mask[0, 0, is_hidden] = torch.finfo(mask.dtype).min
        mask[..., num_skipped] = 0
        found = []
        for layers._functions, layers.most_rows in (
            (None, 0),
            (functions, 0),
            (functions, 40),
        ):
            backend.cache.zero_()
            masks = [mask[..., num_skipped:]] * len(backend.kinds.numbers)
            with torch.inference_mode():
                out = backend._run(rows, spans, masks, num_visible, None, (1, LAST))
            found.append((out.logits, out.features, backend.cache.clone()))
        for one_by_one, *others in zip(*found, strict=True):
            assert one_by_one.any()
            assert all(torch.equal(one_by_one, other) for other in others)


def test_an_operator_that_errs_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # With products of torch the steps are called one by one.
    monkeypatch.setattr(engine.forward.fused, "seconds_of_passes", always_fast("torch, merged"))
    monkeypatch.setattr(engine.forward.cpu_layers, "seconds_of_passes", always_fast("merged"))
    monkeypatch.setattr(CpuOperators, "gate", lambda _, both: both.chunk(2, dim=-1)[0].clone())
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    backend = FusedBackend(loaded, LaneLayout(1, 64))
    backend.take_over()
    assert backend._cpu_layers is None
    assert "operators (merged) give other logits" in caplog.text
    assert not backend.cache.any()
