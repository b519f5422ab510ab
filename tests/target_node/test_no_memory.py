"""Where memory is missing in the middle of a text: one line, and the other texts go on."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.errors import EngineError
from engine.model_executor import ModelExecutor
from node.forwards import Forwards, SimulatedDevice
from node.loop import Loop
from proto.errors import NodeError
from proto.messages import FaultCode
from tests.target_node.real import RealTarget, heart
from tests.target_node.test_not_finite import (
    OTHER,
    PROMPT,
    asked,
    executor,
    faults_of,
    text_of,
    written,
)
from tests.tiny_models import make_model

ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.\nSee the manual"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    MemoryError("Unable to allocate 8 GiB for an array"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


class Scarce:
    """Lets an executor fail with `error` in passes that `fails` picks by their number of rows."""

    def __init__(self, made: ModelExecutor, error: Exception) -> None:
        self.fails: Callable[[int], bool] = lambda _: False
        self.num_failed = 0
        forward: Any = made.forward

        def scarce(step: Any, layers: Any = ()) -> Any:
            if self.fails(step.rows.shape[1]):
                self.num_failed += 1
                raise error
            return forward(step, layers)

        made.forward = scarce  # type: ignore[method-assign]


def scarce_target(folder: Path, error: Exception) -> tuple[RealTarget, Scarce]:
    target = RealTarget(executor(folder, "fused", is_bad=False))
    return target, Scarce(target.executor, error)


def whole_text(folder: Path, opened: Any) -> tuple[int, ...]:
    return written(RealTarget(executor(folder, "fused", is_bad=False)), opened)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_prompt_that_finds_no_memory_ends_its_own_text_alone(
    folder: Path, error: Exception
) -> None:
    want = whole_text(folder, asked(OTHER, session=2))
    target, scarce = scarce_target(folder, error)
    target.hear(asked(OTHER, session=2))
    for _ in range(3):
        target.turn()
    scarce.fails = lambda num_rows: num_rows > 8
    target.hear(asked(PROMPT))
    target.run()
    assert scarce.num_failed == 1
    (fault,) = faults_of(target)
    assert (fault.session, fault.code) == (1, FaultCode.FAILED)
    assert "memory was missing in the middle of a text (" in fault.detail
    assert "--max-model-len" in fault.detail
    assert "\n" not in fault.detail
    assert text_of(target, 2) == want


def test_texts_of_one_pass_are_read_anew_and_say_what_they_would_have_said(folder: Path) -> None:
    first, second = asked(PROMPT), asked(OTHER, session=2)
    want = whole_text(folder, first), whole_text(folder, second)
    target, scarce = scarce_target(folder, ERRORS[0])
    target.hear(first, second)
    while not (text_of(target, 1) and text_of(target, 2)):
        target.turn()
    left = [1]

    def once(_num_rows: int) -> bool:
        return target.passes[-1] in ([1, 2], [2, 1]) and left.pop() == 1 if left else False

    scarce.fails = once
    num_passes = len(target.passes)
    target.run()
    assert scarce.num_failed == 1
    assert faults_of(target) == []
    assert (text_of(target, 1), text_of(target, 2)) == want
    anew = target.passes[num_passes + 1 :]
    assert [1] in anew
    assert [2] in anew, "both are read"


def test_texts_that_never_find_memory_together_go_on_alone(folder: Path) -> None:
    first, second = asked(PROMPT), asked(OTHER, session=2)
    want = whole_text(folder, first), whole_text(folder, second)
    target, scarce = scarce_target(folder, ERRORS[1])
    target.hear(first, second)
    scarce.fails = lambda _: len(target.passes[-1]) == 2
    target.run()
    assert scarce.num_failed > 1
    assert faults_of(target) == []
    assert (text_of(target, 1), text_of(target, 2)) == want


def test_another_error_is_not_taken_for_one_of_memory(folder: Path) -> None:
    target, scarce = scarce_target(folder, RuntimeError("mat1 and mat2 shapes"))
    scarce.fails = lambda _: True
    target.hear(asked(PROMPT))
    with pytest.raises(RuntimeError, match="mat1"):
        target.turn()


def test_ranks_end_with_a_line_for_others_wait_in_the_pass(folder: Path) -> None:
    made = executor(folder, "fused", is_bad=False)
    made.loaded = SimpleNamespace(rank=object())  # type: ignore[assignment]
    forwards = Forwards(made, heart(), SimulatedDevice(0.0, 0.0))
    with pytest.raises(EngineError, match="memory was missing in the middle of a text"):
        forwards.without_memory(torch.OutOfMemoryError("CUDA out of memory"))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_finds_no_memory_beside_a_pass_ends_the_node_with_a_line(error: Exception) -> None:
    def receive(*_: object, **__: object) -> Any:
        raise error

    watch = SimpleNamespace(enter=lambda phase: None)
    loop: Any = Loop(
        SimpleNamespace(receive=receive),  # type: ignore[arg-type]
        SimpleNamespace(watch=watch),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        lambda _: None,  # type: ignore[arg-type,return-value]
    )
    with pytest.raises(NodeError, match="there is no memory left: ") as told:
        loop.run()
    assert "\n" not in str(told.value)
