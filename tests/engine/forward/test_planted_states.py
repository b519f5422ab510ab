"""Sessions with trees catch what a layer that is no attention may do wrong: faults are planted.

A small model of each mechanism runs the sessions of `tests/engine/test_families.py`.
"""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.model import load_model
from engine.forward import delta_rule, kimi_delta, lightning, mamba1, mamba2, recurrent_unit
from engine.forward.cache_tensors import STATE_STEP, SlotCache
from engine.forward.running_states import _Lane
from engine.model_executor import ModelExecutor
from tests.engine.recomputed import errors
from tests.families import USUAL, load
from tests.small_families import make_small

TOLERANCE = 1e-3
NUM_PASSES = 24  # of one text, then of a second one that begins as a copy
# One family of each mechanism -> the file with its rule of states.
RULES: dict[str, Any] = {
    "lfm2": None,  # it has convolutions alone
    "qwen3_5_text": delta_rule,
    "kimi_linear": kimi_delta,
    "minimax": lightning,
    "bamba": mamba2,
    "jamba": mamba1,
    "recurrent_gemma": recurrent_unit,
}
WITHOUT_CONVOLUTION = ("minimax",)


def session(kind: str, folder: Path) -> Any:
    """Yield the error of each pass of a session."""
    make_small(kind, folder)
    executor = ModelExecutor(load_model(str(folder), dtype="float32"), 320, num_lanes=2)
    return errors(executor, load(folder), seed=7)


def sees_siblings(patch: pytest.MonkeyPatch, _: Any) -> None:
    """A row takes any token before its position for its ancestor."""
    see = SlotCache.see

    def planted(self: SlotCache, positions: torch.Tensor, mask: torch.Tensor) -> None:
        see(self, positions, torch.zeros_like(mask))

    patch.setattr(SlotCache, "see", planted)


def convolves_slots(patch: pytest.MonkeyPatch, _: Any) -> None:
    """A convolution reads the slots before a row's own, whose tokens need not be its ancestors."""

    def planted(self: SlotCache, seen: torch.Tensor) -> torch.Tensor:
        back = 1 + torch.arange(self._num_before)
        where = (self.slots - self.lane)[:, None] - back
        return seen[:, where.clamp(min=0)] * (where >= 0)[..., None]

    patch.setattr(SlotCache, "before", planted)


def never_advances(patch: pytest.MonkeyPatch, _: Any) -> None:
    """The state behind some tokens is the one before them."""
    run = _Lane._run

    def planted(self: _Lane, *args: Any) -> Any:
        for made, _behind in run(self, *args):
            yield made, args[-1]

    patch.setattr(_Lane, "_run", planted)


def counts_from_the_root(patch: pytest.MonkeyPatch, _: Any) -> None:
    """States end at the root, and rows add the tokens from the last border on once more."""
    note, path = SlotCache.note, SlotCache.path

    def longer(self: SlotCache, *args: Any, **named: Any) -> None:
        note(self, *args, **named)
        self._longest += self.committed % STATE_STEP

    def from_border(self: SlotCache) -> Any:
        root = self.committed
        self.committed -= root % STATE_STEP
        found = path.fget(self)  # type: ignore[attr-defined]
        self.committed = root
        return found

    patch.setattr(SlotCache, "note", longer)
    patch.setattr(SlotCache, "path", property(from_border))


def decays_of_rows(patch: pytest.MonkeyPatch, rule: Any) -> None:
    """The tokens of a row fade as those of the row beside it."""
    run = rule._run

    def planted(*args: Any, **named: Any) -> Any:
        *before, queries, given, state = args
        module = before[0] if before else None
        first, last = decays_in(given.shape[-1], module)
        given = given.clone()
        given[..., first:last] += given[..., first:last].roll(1, 0)
        return run(*before, queries, given, state, **named)

    def decays_in(size: int, module: Any) -> tuple[int, int]:
        """Return where what tokens give has their decays, or the steps that these are made of."""
        if rule is kimi_delta:
            return 2 * module.qkv_dim, 3 * module.qkv_dim
        parts = {
            delta_rule: lambda: module.num_v_heads,
            lightning: lambda: 1,
            mamba2: lambda: module.num_heads,
            mamba1: lambda: module.intermediate_size,
            recurrent_unit: lambda: size // 2,
        }
        return size - parts[rule](), size

    patch.setattr(rule, "_run", planted)


CONVOLUTIONS = (sees_siblings, convolves_slots)
STATES = (sees_siblings, never_advances, counts_from_the_root, decays_of_rows)
FAULTS = [
    (kind, plant)
    for kind, rule in RULES.items()
    for plant in dict.fromkeys((*CONVOLUTIONS, *(STATES if rule else ())))
    if not (plant is convolves_slots and kind in WITHOUT_CONVOLUTION)
]


@pytest.mark.parametrize("kind", [kind for kind in RULES if kind not in USUAL])
def test_without_a_fault_every_row_is_right(kind: str, tmp_path: Path) -> None:
    """The usual families run whole sessions elsewhere."""
    assert max(islice(session(kind, tmp_path), NUM_PASSES)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(("kind", "plant"), FAULTS)
def test_planted_faults_are_found(
    kind: str,
    plant: Callable[[pytest.MonkeyPatch, Any], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = session(kind, tmp_path)
    plant(monkeypatch, RULES[kind])
    assert any(error > TOLERANCE for error in islice(passes, NUM_PASSES)), "nothing differs"
