"""A forward gives the hidden states behind its logits, if asked: transformers' own."""

from pathlib import Path

import pytest
import torch

from engine.compiled import CompiledBackend
from engine.errors import ModelError
from engine.executor import Executor
from engine.graphs import GraphBackend
from engine.lanes import Lanes, Span
from engine.loading import make_executor
from engine.model import load_model
from engine.slots import Feed
from tests.engine.conftest import Load
from tests.engine.test_slot_cache import TOLERANCE, difference
from tests.tiny_models import SUPPORTED, make_model

TEXT = tuple(i * i % 199 for i in range(40))
BEFORE = tuple(range(30))
CHUNK = Feed(TEXT[:30], BEFORE, BEFORE, 0, None)
ROWS = Feed(TEXT[30:32], (30, 31), (30, 31), 30, (1, 3))


def check(executor: Executor, want: torch.Tensor) -> None:
    """Hold a prefill and a pass of two rows, in another order, to `want` [40, hidden_size]."""
    first = executor.forward(executor.lay_out((CHUNK,), ((29, 3),)), with_hidden=True)
    assert first.hidden is not None
    assert difference(first.hidden, want[[29, 3]]) < TOLERANCE
    then = executor.forward(executor.lay_out((ROWS,), ((1, 0),)), with_hidden=True)
    assert then.hidden is not None
    assert difference(then.hidden, want[[31, 30]]) < TOLERANCE
    assert executor.forward(executor.lay_out((ROWS,), ((1, 0),))).hidden is None


def transformers_own(folder: str) -> torch.Tensor:
    """The last hidden states [40, hidden_size] of a plain forward."""
    model = load_model(folder).model
    with torch.inference_mode():
        out = model(torch.tensor([TEXT]), use_cache=False, output_hidden_states=True)
    states: torch.Tensor = out.hidden_states[-1][0]
    return states


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_the_reference_gives_them(architecture: str, load: Load) -> None:
    loaded = load(architecture)
    check(Executor(loaded, 128), transformers_own(loaded.name))


@pytest.mark.parametrize("fixed_rows", [None, 4])
def test_the_fused_forward_gives_them(fixed_rows: int | None, tmp_path: Path) -> None:
    folder = str(make_model("qwen3", tmp_path))
    executor = make_executor(load_model(folder), 128, fixed_rows=fixed_rows, backend="fused")
    executor.set_total(128)
    check(executor, transformers_own(folder))


def test_nobody_asking_for_a_row_gets_none(load: Load) -> None:
    executor = Executor(load("llama"), 128, backend="fused")
    out = executor.forward(executor.lay_out((CHUNK,), ((),)), with_hidden=True)
    assert out.hidden is not None
    assert (out.logits.shape, out.hidden.shape) == ((0, 199), (0, 64))


@pytest.mark.parametrize("backend", [CompiledBackend, GraphBackend])
def test_what_is_recorded_without_them_says_so(
    backend: type[CompiledBackend | GraphBackend], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.graphs.recorder", lambda _device: None)
    monkeypatch.setattr("engine.compiled.shutil.which", lambda _: "g++")
    made = backend(load("llama"), Lanes(1, 128), (1,))
    row = torch.tensor([[5], [0], [0], [0], [1]])
    with pytest.raises(ModelError, match=rf"backend {made.name} gives no hidden states; use fused"):
        made.forward(row, (Span(0, 1),), num_visible=64, with_hidden=True)
