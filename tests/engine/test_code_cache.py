"""What torch compiles is found again by the next process."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.code_cache import make_source_repeatable
from tests.engine.test_compiled import needs_compiler
from tests.tiny_models import make_model

ROOT = Path(__file__).resolve().parents[2]
LOAD = """
import sys
import torch
from engine.executor import Executor
from engine.model import load_model
torch.set_num_threads(1)
executor = Executor(load_model(sys.argv[1]), 320, backend="compiled", row_counts=(1,))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constants_are_named_by_their_content(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert source_of(weight) == source_of(weight.clone())
    other = weight.clone()
    other[5, 7] += 1
    assert source_of(other) != source_of(weight)
    assert source_of(weight[:, :16]) != source_of(weight[:, 16:])
    assert source_of(torch.tensor(1.0, dtype=dtype)) != source_of(torch.tensor(2.0, dtype=dtype))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    again = torch.ops.mkldnn._reorder_linear_weight(weight.clone(), None)
    assert source_of(packed) == source_of(again) != source_of(weight)  # by its shape alone


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
