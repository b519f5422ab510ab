"""The small operators of a layer, merged: as plain functions, and compiled for this processor.

Recordings are stood for as in `test_graphs.py`; how many kernels a GPU gets is in tests/gpu.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import engine.forward.graphs
from engine.checkpoint.model import load_model
from engine.executor import ModelExecutor
from engine.forward import small_operators
from engine.forward.fused import FAMILIES, FusedBackend
from engine.forward.graphs import GraphBackend
from engine.layout.slots import SlotMap
from engine.loading import make_executor
from tests.engine.flex_forms import always, counted
from tests.engine.forward.test_fused import TOLERANCES, save, session_differences
from tests.engine.test_slot_cache import difference

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
@pytest.mark.parametrize("architecture", FAMILIES)
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


class Operators(TorchDispatchMode):
    """Counts operators that are no views; those of a merged one as its kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def merged(self, function: Program) -> Program:
        """What stands for a program."""

        def run(*args: Any) -> Any:
            name = function.__name__
            self.counts[name] += KERNELS[name]
            with _disable_current_modes():
                return function(*args)

        return run


def small_operators_of_a_layer(
    architecture: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_merged: bool
) -> int:
    """How many of a recorded pass of two rows are neither matrix products nor attention."""
    monkeypatch.setattr(engine.forward.fused, "of_pairs", engine.forward.fused.at_once)
    totals = []
    for num_layers in (2, 3):
        options = {"num_hidden_layers": num_layers, "max_window_layers": num_layers}
        graphs = graphs_of(save(architecture, folder / str(num_layers), options))
        fused_in(graphs).is_merged = is_merged
        graphs._backend.forget()  # type: ignore[attr-defined]
        step = SlotMap[int](NUM_SLOTS)
        graphs.run(step.feed_prefix(range(20)), ())
        laid_out = graphs.lay_out([step.feed((5, 6))], [(0, 1)])
        counter = Operators()
        monkeypatch.setattr(small_operators, "_compiled", counter.merged)
        with counter:
            graphs.forward(laid_out)
        monkeypatch.setattr(small_operators, "_compiled", lambda function: function)
        totals.append(counter.counts)
    of_a_layer = totals[1] - totals[0]
    # What torch on a CPU spells out is one kernel on a GPU.
    of_a_layer["rms_norm"] = of_a_layer["rsqrt"]
    for part in ("pow", "mean", "add", "rsqrt", "mul"):
        del of_a_layer[part]
    return of_a_layer.total()
