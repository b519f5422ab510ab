"""A program that was clearly slower than the fused forward is not made at the next start."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import engine.forward.compiled
from engine.checkpoint.model import load_model
from engine.forward.compiled import known_slower, note_slower, verdict_key
from engine.forward.forward import Backend
from engine.loading import Engine, load_engine
from tests.engine.forward.test_compiled import needs_compiler
from tests.tiny_models import make_model


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An empty cache; programs run uncompiled, and the list has the rows of each that is made."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    found: list[int] = []

    def uncompiled(module: torch.nn.Module, _: object) -> torch.nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: found.append(len(inputs[0])))
        return module

    monkeypatch.setattr(engine.forward.compiled, "_compiled", uncompiled)
    return found


def timed(monkeypatch: pytest.MonkeyPatch, times_fused: Mapping[int, float]) -> None:
    """Let programs take so many times as long as the fused forward, by their rows."""

    def seconds(backend: Backend, rows: torch.Tensor, _num_visible: int) -> float:
        return times_fused[rows.shape[1]] if backend.name == "compiled" else 1.0

    monkeypatch.setattr(engine.forward.compiled, "_seconds", seconds)


def started(
    model: str,
    *,
    fixed_rows: int | None = None,
    num_lanes: int = 1,
    said: list[str] | None = None,
) -> Engine:
    return load_engine(
        model,
        revision=None,
        dtype="float32",
        device="cpu",
        max_len=64,
        num_lanes=num_lanes,
        fixed_rows=fixed_rows,
        warm_rows=(1,),
        say=[].append if said is None else said.append,
        backend="compiled",
        row_counts={"compiled": (1, 4)},
    )


@needs_compiler
def test_it_is_made_once(tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(make_model("llama", tmp_path / "model"))
    timed(monkeypatch, {1: 0.5, 4: 3.0})
    assert started(model).executor.row_counts == (1,)
    assert set(made) == {1, 4}
    made.clear()
    assert started(model).executor.row_counts == (1,)
    assert set(made) == {1}
    assert started(model, fixed_rows=4).executor.row_counts == (4,), "clocks decide nothing there"


@needs_compiler
def test_without_any_program_the_fused_forward_runs(
    tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make_model("llama", tmp_path / "model"))
    timed(monkeypatch, {1: 2.0, 4: 3.0})
    first: list[str] = []
    second: list[str] = []
    started(model, said=first)
    assert "compiling (up to a minute)" in first
    made.clear()
    executor = started(model, said=second).executor
    assert "compiling (up to a minute)" not in second
    assert executor.row_counts == ()
    assert executor.backend == "fused"
    assert not made
    started(model, num_lanes=2)
    assert made, "another number of lanes was not timed"


@needs_compiler
def test_what_may_be_chance_is_timed_again(
    tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make_model("llama", tmp_path / "model"))
    timed(monkeypatch, {1: 1.05, 4: 1.05})
    for _ in range(2):
        made.clear()
        assert started(model).executor.row_counts == ()
        assert set(made) == {1, 4}


def test_notes_are_of_one_model_and_one_that_cannot_be_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first, second = (
        verdict_key(load_model(str(make_model(family, tmp_path / family))), 1, ())
        for family in ("llama", "qwen2")
    )
    note_slower(first, [9])
    note_slower(first, [1])
    assert known_slower(first) == {1, 9}
    assert not known_slower(second)
    (file,) = tmp_path.glob("*.json")
    for content in ("{", "[]", json.dumps({first: 3}), json.dumps({first: ["x"]})):
        file.write_text(content)
        assert not known_slower(first)
    file.unlink()
    file.mkdir()
    note_slower(first, [1])
    assert not known_slower(first)
