"""Under `auto` on a CPU the programs that earlier starts have kept run the model, if they are good.

No program is compiled here: a kept one is played by the module that it would be compiled of.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.forward.compiled
from engine.checkpoint.model import load_model
from engine.executor import ModelExecutor
from engine.forward.compiled import CompiledBackend
from engine.forward.kept_programs import Program
from engine.loading import make_executor
from tests.engine.forward.test_fused import TOLERANCES, session_differences
from tests.tiny_models import make_model

ROW_COUNTS = (1, 4)
Keep = Callable[..., None]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(make_model("llama", tmp_path, scale=0.5))


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Keep:
    """Function: let programs of all numbers of rows be kept; `scale`: they give logits times it."""

    def keep(scale: float = 1.0, times_fused: float = 0.5) -> None:
        def kept(_key: str, module: Any) -> Callable[..., list[torch.Tensor]]:
            def program(tensors: Sequence[torch.Tensor], _num_visible: int) -> list[torch.Tensor]:
                with torch.no_grad():
                    logits, _ = module(*tensors[:4], list(tensors[4:]))
                return [logits * scale]

            return program

        def timed(*_: object) -> float:
            return times_fused

        monkeypatch.setattr(engine.forward.compiled, "is_kept", lambda _key: True)
        monkeypatch.setattr(engine.forward.compiled, "kept", kept)
        monkeypatch.setattr(engine.forward.compiled, "known_slower", lambda _about: set())
        monkeypatch.setattr(CompiledBackend, "_times_fused", timed)

    return keep


def auto(model: str, **how: Any) -> ModelExecutor:
    loaded = load_model(model, dtype="float32")
    return make_executor(loaded, 320, backend="auto", kept_rows=ROW_COUNTS, **how)


def test_kept_programs_give_the_logits_of_the_reference(model: str, keep: Keep) -> None:
    keep()
    executor = auto(model)
    assert (executor.backend, executor.row_counts) == ("compiled", ROW_COUNTS)
    reference = make_executor(load_model(model, dtype="float32"), 320, backend="reference")
    for error in session_differences(reference, executor, seed=0):
        assert error < TOLERANCES["float32"]


def test_without_any_it_is_fused_and_nothing_compiles(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(CompiledBackend, "_compile", None)
    assert auto(model).backend == "fused"
    assert not (tmp_path / "cache").exists()


def test_reproducible_mode_does_not_look_for_them(model: str, keep: Keep) -> None:
    keep()
    assert auto(model, fixed_rows=4).backend == "fused"


def test_a_model_that_is_large_has_no_copies_of_its_weights(
    model: str, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep()
    monkeypatch.setattr(engine.forward.compiled, "MOST_BYTES_UNASKED", 1000)
    assert auto(model).backend == "fused"


def test_programs_that_are_slower_here_are_not_used_and_no_verdict_is_noted(
    model: str, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(times_fused=2.0)
    monkeypatch.setattr(engine.forward.compiled, "note_slower", None)
    executor = auto(model)
    assert (executor.backend, executor.row_counts) == ("fused", ())


def test_programs_that_give_other_logits_are_not_used(
    model: str, keep: Keep, caplog: pytest.LogCaptureFixture
) -> None:
    keep(scale=2.0)
    with caplog.at_level(logging.WARNING):
        assert auto(model).backend == "fused"
    (line,) = caplog.messages
    assert line.startswith("the backend compiled is not used: ")


def test_programs_are_what_is_timed_in_a_short_cache_too(
    model: str, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, ran = CompiledBackend._times_fused, []
    keep()
    run = CompiledBackend._run

    def noted(self: CompiledBackend, *how: Any) -> Any:
        ran.append(how)
        return run(self, *how)

    def counted(self: CompiledBackend, *how: Any) -> float:
        ran.clear()
        timed(self, *how)
        assert len(ran) > 10
        return 0.5

    monkeypatch.setattr(CompiledBackend, "_run", noted)
    monkeypatch.setattr(CompiledBackend, "_times_fused", counted)
    loaded = load_model(model, dtype="float32")
    assert make_executor(loaded, 129, backend="auto", kept_rows=(1,)).backend == "compiled"


def test_where_one_cannot_be_opened_the_others_run(
    model: str, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep()
    opened = engine.forward.compiled.kept
    found: list[Program | None] = []

    def only_the_second(key: str, module: Any) -> Program | None:
        found.append(opened(key, module) if found else None)
        return found[-1]

    monkeypatch.setattr(engine.forward.compiled, "kept", only_the_second)
    executor = auto(model)
    assert (executor.backend, executor.row_counts) == ("compiled", (4,))
    monkeypatch.setattr(engine.forward.compiled, "kept", lambda *_: None)
    assert auto(model).backend == "fused"
