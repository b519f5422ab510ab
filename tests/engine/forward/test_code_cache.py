"""What torch compiles is found again by the next process."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.forward.compiled import make_source_repeatable
from tests.engine.forward.test_compiled import needs_compiler, pair
from tests.engine.forward.test_fused import TOLERANCES, session_differences
from tests.tiny_models import make_model

ROOT = Path(__file__).resolve().parents[3]
LOAD = """
import sys
import torch
from engine.executor import ModelExecutor
from engine.checkpoint.model import load_model
torch.set_num_threads(1)
executor = ModelExecutor(load_model(sys.argv[1]), 320, backend="compiled", row_counts=(1,))
executor.warm_up((1,))
assert executor._backend._made == {1}
"""


def source_of(data: torch.Tensor) -> str:
    """How inductor would name a constant in what it writes."""
    from torch._inductor.graph import GraphLowering

    make_source_repeatable()
    graph = SimpleNamespace(
        constants={}, constant_reprs={}, allocated_constant_name={}, qualify_name=lambda name: name
    )
    name = GraphLowering.allocate_non_dup_const_name(graph, "weight", data)  # type: ignore[arg-type]
    return str(graph.constant_reprs[name])


def test_constants_are_named_by_their_shape() -> None:
    weight = torch.randn(64, 32)
    assert source_of(weight) == source_of(torch.randn(64, 32))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    others = [weight.double(), weight.T.contiguous(), packed]
    assert len({source_of(other) for other in (weight, *others)}) == 4


@needs_compiler
@pytest.mark.slow
def test_two_models_of_one_shape_keep_their_weights(tmp_path: Path) -> None:
    executors = [
        pair(make_model("llama", tmp_path / str(seed), seed, scale=0.5)) for seed in (1, 2)
    ]
    for reference, compiled in (*executors, *executors):
        for error in session_differences(reference, compiled, seed=3, num_rounds=10):
            assert error < TOLERANCES["float32"]


@needs_compiler
@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nexec {os.environ.get("CXX", "g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    model = str(make_model("llama", tmp_path / "model"))
    environment = os.environ | {
        "CXX": str(compiler),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    compiled = []
    for _ in range(2):
        log.write_text("")
        subprocess.run(
            [sys.executable, "-c", LOAD, model], env=environment, check=True, timeout=300
        )
        compiled.append([line for line in log.read_text().splitlines() if ".so" in line])
    first, second = compiled
    assert first
    assert not second
