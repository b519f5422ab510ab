"""Every family that is not refused runs as the table of families says, and so docs/models.md.

A small random model of each is loaded as on a GPU, which is played (`stand_in.py`): whatever would
make the host wait raises an error. Loading compares the logits of recorded passes of a tree with
those of transformers.
"""

from pathlib import Path

import pytest
from transformers import logging

from engine.checkpoint import families
from engine.checkpoint.model import load_model
from engine.errors import ModelError
from engine.forward import cpu_experts
from engine.forward.experts import has_experts
from engine.loading import make_executor
from tests.engine.forward.test_recorded_families import inner_of
from tests.engine.stand_in import StandIn, device
from tests.small_families import make_small

__all__ = ["device"]  # a fixture
RUN = [
    kind
    for kind in sorted(families.CAUSAL - set(families.WRAPPERS))
    if families.family(kind).is_tested
]


@pytest.mark.parametrize("kind", RUN)
def test_a_family_runs_in_the_forms_that_the_table_names(
    kind: str, tmp_path: Path, device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.set_verbosity_error()
    told, folder = families.family(kind), str(make_small(kind, tmp_path))
    loaded = load_model(folder, dtype="float32")
    assert bool(loaded.kinds.windows) == told.has_windows
    assert any(window.is_chunk for window in loaded.kinds.windows) == told.has_chunks
    if told.has_attention:
        assert (loaded.model.config._attn_implementation == "eager") == told.is_eager
    experts = list(filter(has_experts, loaded.model.modules()))
    assert bool(experts) == (told.experts == "common")
    if told.is_recorded:
        inner = inner_of(make_executor(loaded, 96, backend="graphs", row_counts=(1, 4)))
        assert inner.name == ("fused" if told.is_fused else "reference")
        assert told.is_fused or inner.experts.is_used == bool(experts)
        assert device.num_captures > 0
    else:
        with pytest.raises(ModelError, match="cannot be recorded as CUDA graphs"):
            make_executor(loaded, 96, backend="graphs", row_counts=(1, 4))
    monkeypatch.setattr(cpu_experts, "quickest", lambda *_, **__: "sorted and packed")
    executor = make_executor(load_model(folder, dtype="float32"), 96)
    assert executor.backend == ("fused" if told.is_fused else "reference")
    packed = [part for part in executor.loaded.model.modules() if has_experts(part)]
    assert all(part.down_proj.numel() == 0 for part in packed)
