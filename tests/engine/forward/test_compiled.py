"""The compiled backend against the reference; skipped where there is no C++ compiler."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import engine.forward.compiled
from engine.checkpoint.model import load_model
from engine.device import cpu_is_fast_in
from engine.errors import ModelError
from engine.executor import ModelExecutor
from engine.forward.forward import Layers
from engine.loading import make_executor
from engine.selfcheck import check_reproducible
from tests.engine.forward.test_features import LAYERS, check, transformers_own
from tests.engine.forward.test_fused import TOLERANCES, save, session_differences
from tests.tiny_models import make_model

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)
ROW_COUNTS = (1, 4)


def pair(
    folder: Path, dtype: str = "float32", layers: Layers = ()
) -> tuple[ModelExecutor, ModelExecutor]:
    """The reference, and programs for passes of 1 and of 4 rows."""
    reference = make_executor(load_model(str(folder), dtype=dtype), 320, backend="reference")
    compiled = make_executor(
        load_model(str(folder), dtype=dtype),
        320,
        backend="compiled",
        row_counts=ROW_COUNTS,
        layers=layers,
    )
    return reference, compiled


@needs_compiler
@pytest.mark.long
def test_sessions_get_the_logits_of_the_reference_from_two_programs(tmp_path: Path) -> None:
    # Passes of up to 6 rows: some fit a program, some are filled up, some run without one.
    folder = make_model("llama", tmp_path, scale=0.5)
    reference, compiled = pair(folder, layers=LAYERS)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for error in session_differences(reference, compiled, seed=0):
        assert error < TOLERANCES["float32"]
    backend = compiled._backend
    assert isinstance(backend, engine.forward.compiled.CompiledBackend)
    check(compiled, transformers_own(str(folder)))
    assert backend._made == set(ROW_COUNTS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "made anew"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3"])
def test_every_family_is_covered(architecture: str, dtype: str, tmp_path: Path) -> None:
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic")
    if dtype == "float32":
        folder = save(architecture, tmp_path, {})
    else:
        folder = make_model(architecture, tmp_path, scale=0.5)
    for error in session_differences(*pair(folder, dtype), seed=1):
        assert error < TOLERANCES[dtype]


@needs_compiler
@pytest.mark.slow
def test_fixed_row_counts_are_reproducible(tmp_path: Path) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    check_reproducible(make_executor(loaded, 192, backend="compiled", fixed_rows=4))


def test_without_a_compiler_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.forward.compiled.shutil, "which", lambda _: None)
    loaded = load_model(str(make_model("llama", tmp_path)))
    with pytest.raises(ModelError, match=r"needs a C\+\+ compiler: install g\+\+, or use fused"):
        make_executor(loaded, 128, backend="compiled", row_counts=ROW_COUNTS)


@needs_compiler
def test_a_family_that_is_not_covered_is_refused(tmp_path: Path) -> None:
    loaded = load_model(str(make_model("gpt2", tmp_path)))
    with pytest.raises(ModelError, match="fused engine has no"):
        make_executor(loaded, 128, backend="compiled", row_counts=ROW_COUNTS)
