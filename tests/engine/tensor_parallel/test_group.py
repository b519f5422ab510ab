"""How ranks part: without recordings, which hold on to their communication, and within seconds."""

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import engine.forward.graphs
from engine.checkpoint.model import load_model
from engine.model_executor import ModelExecutor
from engine.tensor_parallel import group
from tests.engine.flex_forms import counted
from tests.engine.tensor_parallel.test_parts import rank_of
from tests.tiny_models import make_model

ROOT = Path(__file__).resolve().parents[3]
# A group of one whose end hangs, in a process that ends.
HANGING = """
import tempfile, threading, torch
from engine.tensor_parallel import group

group.PART_LIMIT_S = 0.1
group.meet(tempfile.mkdtemp() + "/store", 0, 1, torch.device("cpu"))
group.dist.destroy_process_group = lambda: threading.Event().wait()
group.distributed_c10d._abort_process_group = lambda: threading.Event().wait()
print("done")
"""


class Group:
    """In place of torch.distributed: a group whose end does not come by itself."""

    def __init__(self, *, hangs: bool) -> None:
        self.calls: list[str] = []
        self._hangs = hangs

    def is_initialized(self) -> bool:
        return True

    def destroy_process_group(self) -> None:
        self.calls.append("end")
        if self._hangs:
            threading.Event().wait()

    def _abort_process_group(self) -> None:
        self.calls.append("break off")


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend of a rank with a recording."""
    monkeypatch.setattr(group, "_RECORDINGS", [])
    monkeypatch.setattr(engine.forward.graphs, "RECORDED_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.graphs, "recorder", counted([]))
    loaded = load_model(str(make_model("llama", tmp_path)), rank=rank_of(0))
    executor = ModelExecutor(loaded, 128, backend="graphs", row_counts=(1,))
    executor.warm_up((1,))
    backend: Any = executor._backend
    assert backend._recorded
    return backend


def test_recordings_are_dropped_before_the_group_ends(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Group(hangs=False)
    ended.destroy_process_group = lambda: ended.calls.append(f"end, {len(recorded._recorded)}")  # type: ignore[method-assign]
    monkeypatch.setattr(group, "dist", ended)
    monkeypatch.setattr(group, "distributed_c10d", ended)
    group._part()
    assert ended.calls == ["end, 0"]


def test_a_backend_that_has_gone_is_not_kept_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_RECORDINGS", [])
    monkeypatch.setattr(engine.forward.graphs, "RECORDED_DEVICES", ("cpu",))
    monkeypatch.setattr(engine.forward.graphs, "recorder", counted([]))
    loaded = load_model(str(make_model("llama", tmp_path)), rank=rank_of(0))
    executor = ModelExecutor(loaded, 128, backend="graphs", row_counts=(1,))
    (found,) = group._RECORDINGS
    assert found() is not None
    executor.free()
    gc.collect()
    assert found() is None


def test_a_group_that_does_not_end_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Group(hangs=True)
    monkeypatch.setattr(group, "PART_LIMIT_S", 0.1)
    monkeypatch.setattr(group, "dist", hanging)
    monkeypatch.setattr(group, "distributed_c10d", hanging)
    group._part()
    assert hanging.calls == ["end", "break off"]


def test_a_process_ends_though_its_group_does_not() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout == "done\n"
    assert done.returncode == 0
