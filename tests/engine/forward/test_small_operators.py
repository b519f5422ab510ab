"""The small operators of a layer, merged: as plain functions, and compiled for this processor.

Recordings are stood for as in `test_graphs.py`; how many kernels a GPU gets is in tests/gpu.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import engine.forward.graphs
from engine.checkpoint.families import FUSED
from engine.checkpoint.model import load_model
from engine.device import cpu_is_fast_in
from engine.errors import ModelError
from engine.forward import operators, small_operators
from engine.forward.fused import FusedBackend
from engine.forward.graphs import GraphBackend
from engine.forward.operators import at_once
from engine.forward.small_operators import gate as small_gate
from engine.forward.small_operators import turn_and_write as small_turn
from engine.layout.slots import SlotMap
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from tests.engine.flex_forms import always, counted
from tests.engine.forward.test_fused import TOLERANCES, save, session_differences
from tests.engine.test_slot_cache import difference
from tests.tiny_models import make_model

ROW_COUNTS = (1, 2, 4)
NUM_SLOTS = 400
# What torch's compiler makes of each on a GPU: tests/gpu counts them.
KERNELS = {"add_and_norm": 1, "turn_and_write": 2, "gate": 1}

Program = Callable[..., Any]


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes on the CPU count as recorded, and merged operators are faster than others."""
    monkeypatch.setattr(engine.forward.graphs, "RECORDED_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.graphs, "recorder", counted([]))
    monkeypatch.setattr(engine.forward.graphs, "capture_on", lambda *_: None)
    monkeypatch.setattr(engine.forward.graphs, "MERGED_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.graphs, "quickest", always("merged"))


@pytest.fixture
def plain(merging: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged operators are not compiled."""
    monkeypatch.setattr(small_operators, "_compiled", lambda function: function)


def graphs_of(folder: Path, dtype: str = "float32", **options: Any) -> ModelExecutor:
    loaded = load_model(str(folder), dtype=dtype)
    return make_executor(loaded, NUM_SLOTS, backend="graphs", row_counts=ROW_COUNTS, **options)


def fused_in(executor: ModelExecutor) -> FusedBackend:
    assert isinstance(executor._backend, GraphBackend)
    return executor._backend._fused


def errors(folder: Path, graphs: ModelExecutor, seed: int = 0) -> list[float]:
    """Of the logits of a random session, relative to the reference's."""
    loaded = load_model(str(folder), dtype="float32")
    reference = make_executor(loaded, NUM_SLOTS, backend="reference")
    return list(session_differences(reference, graphs, seed=seed))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
@pytest.mark.parametrize("architecture", FUSED)
def test_merged_operators_give_the_logits_of_the_reference(
    architecture: str, num_key_heads: int, tmp_path: Path
) -> None:
    folder = save(architecture, tmp_path, {"num_key_value_heads": num_key_heads})
    graphs = graphs_of(folder)
    assert fused_in(graphs).is_merged
    assert max(errors(folder, graphs)) < TOLERANCES["float32"]


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rows_of_several_lanes_and_hidden_states_are_those_of_separate_operators(
    architecture: str, tmp_path: Path
) -> None:
    folder, layers = save(architecture, tmp_path, {}), (2, -1, 0)
    graphs = graphs_of(folder, num_lanes=3, layers=layers)
    fused = fused_in(graphs)
    for lanes, num_rows in (((0,), 1), ((2,), 4), ((2, 0), 2), ((1, 2), 1), ((0, 1, 2), 4)):
        feeds = []
        for lane in lanes:
            step = SlotMap[int](NUM_SLOTS, lane=lane)
            graphs.run(step.feed_prefix([7 + lane, *range(20 + lane)]), ())
            feeds.append(replace(step.feed(range(30 + lane, 30 + lane + num_rows)), lane=lane))
        laid_out = graphs.lay_out(feeds, [range(num_rows)] * len(feeds))
        found = {}
        for fused.is_merged in (False, True):
            graphs._backend.forget()  # type: ignore[attr-defined]
            out = graphs.forward(laid_out, layers)
            assert out.features is not None
            cache = fused.cache.clone()
            found[fused.is_merged] = out.logits.clone(), out.features.clone(), cache
        for got, want in zip(found[True], found[False], strict=True):
            assert difference(got.flatten(1), want.flatten(1)) < TOLERANCES["float32"]
    assert graphs.num_uncaptured == 0


def address(of: Any) -> int:
    """Where the memory of a tensor begins, or that of the first of several."""
    return int((of if isinstance(of, torch.Tensor) else of[0]).untyped_storage().data_ptr())


class Operators(TorchDispatchMode):
    """Counts kernels: operators that are no views, and calls as what they are on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        if not func.is_view or address(made) != address(args[0]):  # reshape may have to copy
            self.counts[func.overloadpacket.__name__] += 1
        return made

    def counts_as(self, name: str, num_kernels: int, function: Program) -> Program:
        def run(*args: Any) -> Any:
            self.counts[name] += num_kernels
            with _disable_current_modes():
                return function(*args)

        return run

    def merged(self, function: Program) -> Program:
        """In place of `_compiled`."""
        return self.counts_as(function.__name__, KERNELS[function.__name__], function)

    def norm(self, *of: Any) -> Program:
        """In place of a form of the norm: torch on a CPU spells out what is one kernel on a GPU."""
        return self.counts_as("norm", 1, at_once(*of))


PRODUCTS_AND_ATTENTION = ("linear", "scaled_dot_product_attention")


def kernels_of_a_layer(
    architecture: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_merged: bool
) -> int:
    """How many of a recorded pass of two rows are neither matrix products nor attention."""
    found = []
    for num_layers in (2, 3):
        counter = Operators()
        monkeypatch.setattr(engine.forward.fused, "of_pairs", counter.norm)
        monkeypatch.setattr(small_operators, "_compiled", counter.merged)
        # As a GPU does it: no weight is packed, and each product is one operator.
        monkeypatch.setattr(operators, "packed_product", lambda *_: None)
        options: dict[str, Any] = {"num_hidden_layers": num_layers}
        if architecture != "llama":
            options["layer_types"] = ["full_attention"] * num_layers
        graphs = graphs_of(save(architecture, folder / f"{num_layers} {is_merged}", options))
        fused_in(graphs).is_merged = is_merged
        graphs._backend.forget()  # type: ignore[attr-defined]
        step = SlotMap[int](NUM_SLOTS)
        graphs.run(step.feed_prefix(range(20)), ())
        laid_out = graphs.lay_out([step.feed((5, 6))], [(0, 1)])
        counter.counts.clear()
        with counter:
            graphs.forward(laid_out)
        found.append(counter.counts)
    of_a_layer = found[1] - found[0]
    return of_a_layer.total() - sum(of_a_layer[name] for name in PRODUCTS_AND_ATTENTION)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("architecture", "before"), [("llama", 13), ("qwen2", 13), ("qwen3", 16)])
def test_a_layer_has_six_kernels_beside_products_and_attention(
    architecture: str, before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernels_of_a_layer(architecture, tmp_path, monkeypatch, is_merged=False) == before
    assert kernels_of_a_layer(architecture, tmp_path, monkeypatch, is_merged=True) == 6


def not_added(hidden: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, e: float) -> Any:
    return hidden, F.rms_norm(hidden + change, hidden.shape[-1:], weight, e)


def without_weight(hidden: torch.Tensor, change: torch.Tensor, _: object, e: float) -> Any:
    return hidden + change, F.rms_norm(hidden + change, hidden.shape[-1:], None, e)


def without_silu(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.chunk(2, dim=-1)[0] * gate_up.chunk(2, dim=-1)[1]


def not_a_number(gate_up: torch.Tensor) -> torch.Tensor:
    return small_gate(gate_up) * math.nan


def turned_back(
    qkv: Any, weights: Any, cos: Any, sin: Any, slots: Any, cache: Any, e: float
) -> Any:
    return small_turn(qkv, weights, cos, -sin, slots, cache, e)


def a_slot_too_far(qkv: Any, w: Any, cos: Any, sin: Any, slots: Any, cache: Any, e: float) -> Any:
    return small_turn(qkv, w, cos, sin, (slots + 1) % cache.shape[1], cache, e)


def a_slot_too_many(qkv: Any, w: Any, cos: Any, sin: Any, slots: Any, cache: Any, e: float) -> Any:
    small_turn(qkv, w, cos, sin, (slots + 1) % cache.shape[1], cache, e)
    return small_turn(qkv, w, cos, sin, slots, cache, e)


def values_turned(qkv: Any, w: Any, cos: Any, sin: Any, slots: Any, cache: Any, e: float) -> Any:
    queries = small_turn(qkv, w, cos, sin, slots, cache, e)
    heads = torch.arange(len(cache) // 2, len(cache))
    values = qkv[:, :, -len(heads) :]
    cache.index_put_((heads, slots[:, :, None]), small_operators._turned(values, cos, sin))
    return queries


def rows_mixed_up(qkv: Any, w: Any, cos: Any, sin: Any, slots: Any, cache: Any, e: float) -> Any:
    queries = small_turn(qkv, w, cos, sin, slots, cache, e)
    return queries.view(*queries.shape[:2], qkv.shape[1], -1).roll(1, 2).view(queries.shape)


def norms_left_out(qkv: Any, _: Any, cos: Any, sin: Any, slots: Any, cache: Any, e: float) -> Any:
    return small_turn(qkv, None, cos, sin, slots, cache, e)


def fails(_: object) -> torch.Tensor:
    class CompilationError(Exception):  # Triton's own is no RuntimeError either
        pass

    raise CompilationError("no such kernel")


MISTAKES: dict[str, tuple[Program, ...]] = {
    "add_and_norm": (not_added, without_weight),
    "gate": (without_silu, not_a_number, fails),
    "turn_and_write": (
        turned_back,
        a_slot_too_far,
        a_slot_too_many,
        values_turned,
        rows_mixed_up,
        norms_left_out,
    ),
}


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("name", "mistake"), [(name, one) for name, several in MISTAKES.items() for one in several]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mistake_in_a_merged_operator_is_found_at_load(
    name: str,
    mistake: Program,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic")
    monkeypatch.setattr(small_operators, name, mistake)
    caplog.set_level(logging.INFO, logger="engine.forward.graphs")
    folder = make_model("qwen3", tmp_path, scale=0.5)
    graphs = graphs_of(folder, dtype)
    assert not fused_in(graphs).is_merged
    assert caplog.text.count("small operators are not merged: they ") == 1
    if dtype == "float32":
        assert max(errors(folder, graphs)) < TOLERANCES["float32"]


@pytest.mark.usefixtures("plain")
def test_a_recording_that_fails_leaves_the_operators_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = GraphBackend._recording

    def fails_merged(backend: GraphBackend, *args: Any) -> Any:
        if backend._fused.is_merged:
            raise ModelError("cannot be captured")
        return record(backend, *args)

    monkeypatch.setattr(GraphBackend, "_recording", fails_merged)
    folder = save("llama", tmp_path, {})
    graphs = graphs_of(folder)
    assert not fused_in(graphs).is_merged
    assert max(errors(folder, graphs)) < TOLERANCES["float32"]


@pytest.mark.usefixtures("plain")
def test_what_is_slower_merged_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.forward.graphs, "quickest", always("one by one"))
    assert not fused_in(graphs_of(save("llama", tmp_path, {}))).is_merged


@pytest.mark.usefixtures("plain")
def test_reproducible_passes_all_have_the_operators_one_by_one(tmp_path: Path) -> None:
    # Those of a prompt have no recording, and must leave the same bits in the cache.
    loaded = load_model(str(save("llama", tmp_path, {})), dtype="float32")
    graphs = make_executor(loaded, 192, backend="graphs", fixed_rows=4)
    assert not fused_in(graphs).is_merged
    assert fused_in(graphs)._small is None


@pytest.mark.long
@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_compiled_at_load_they_serve_all_shapes_and_are_not_compiled_again(
    architecture: str, tmp_path: Path
) -> None:
    folder = save(architecture, tmp_path, {})
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = graphs_of(folder, num_lanes=2)
    assert fused_in(graphs).is_merged
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # For one row and for several: two functions by rows of all lanes, the third by lanes as well.
    assert compiled == 2 + 2 + 2 * 2
    found = errors(folder, graphs)
    assert max(found) < TOLERANCES["float32"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    assert graphs.num_uncaptured < len(found)  # recorded passes are among these
