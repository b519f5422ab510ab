"""What heads in the target's process raise costs drafts, and never the target."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from drafter_node import compute as drafter
from engine.errors import EngineError, OutOfMemory
from engine.layout.slots import Move
from node.events import CopyPrefix, MoveRows, Wipe
from node.turns import Ended
from target_node import compute as target
from target_node.at_home import DrafterDone, DrafterFailed, ForDrafter
from target_node.home_worker import WithDrafter

STEP = ForDrafter(drafter.Compute(1, ()))
MOVE = ForDrafter(MoveRows((Move((1,), (0,)),)))
COPY = ForDrafter(CopyPrefix(0, 1, 4))
WIPE = ForDrafter(Wipe(0, 4))
ERRORS = [
    EngineError("the model's logits are not finite"),
    OutOfMemory("no room"),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    IndexError("index out of range"),
    MemoryError("cannot allocate"),
    AttributeError("'NoneType' object has no attribute 'shape'"),
    ImportError("no module named triton"),
    OSError("cannot open the library of a kernel"),
    EOFError("the compiler has ended"),
]


class Heads:
    """An executor and a worker of heads that raise."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
        self.num_asked = 0

    def compute(self, *_: Any) -> drafter.Proposed:
        """Whatever it is that is asked for."""
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return drafter.Proposed(1, (), 1)

    move = copy_prefix = wipe = compute


def both(heads: Heads, said: list[str]) -> WithDrafter:
    """A target that answers, with these heads."""
    made = WithDrafter.__new__(WithDrafter)
    made._launch = lambda action: Ended(target.Computed(action.ticket, (), 1))
    made._drafter, made._executor = cast(Any, heads), cast(Any, heads)
    made._steps = cast(Any, SimpleNamespace(wait=lambda: None))
    made._heart = cast(Any, SimpleNamespace(trouble=said.append))
    made._has_failed, made._num_threads = False, 0
    return made


@pytest.mark.parametrize("error", ERRORS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("wanted", [STEP, MOVE, COPY, WIPE], ids=["step", "move", "copy", "wipe"])
def test_whatever_heads_raise_is_said_once_and_they_are_not_asked_again(
    wanted: ForDrafter, error: Exception
) -> None:
    heads, said = Heads(error), list[str]()
    node = both(heads, said)
    assert node.launch(wanted) == Ended(DrafterFailed(was_step=wanted is STEP))
    assert node.launch(STEP) == Ended(DrafterFailed(was_step=True))
    assert node.launch(COPY) == Ended(DrafterFailed(was_step=False))
    assert said == [f"its drafter has failed, and drafts no more: {error}"]
    assert heads.num_asked == 1
    assert node.launch(target.Compute(3, ())) == Ended(target.Computed(3, (), 1))


def test_heads_that_work_are_asked_again() -> None:
    heads, said = Heads(None), list[str]()
    node = both(heads, said)
    assert node.launch(STEP) == Ended(DrafterDone(drafter.Proposed(1, (), 1)))
    assert node.launch(MOVE) == node.launch(COPY) == node.launch(WIPE) == Ended(DrafterDone())
    assert heads.num_asked == 4
    assert said == []


def test_a_mistake_of_ours_is_not_hidden() -> None:
    with pytest.raises(AssertionError, match="two feeds of one lane"):
        both(Heads(AssertionError("two feeds of one lane")), []).launch(STEP)
