"""Every family's logits under trees, roll-backs, moves and copies are those of transformers.

The truth is transformers' own forward over each row's whole path, without any cache.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from engine.checkpoint import families
from engine.checkpoint.model import load_model
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from tests.engine.recomputed import errors
from tests.engine.stand_in import StandIn, device
from tests.families import (
    ALL,
    FAMILIES,
    LENGTH,
    PROMPTS,
    USUAL,
    WINDOW,
    WINDOWED,
    greedy_text,
    kind_of,
    load,
    make_family,
)
from tests.small_families import make_small

__all__ = ["device"]  # a fixture
CAPACITY = 320
# Relative to the largest logit of a row. Another order of additions makes a difference of up to
# 6e-4 where experts are chosen; a token that is seen too much or too little, 1e-2 or more.
TOLERANCE = 1e-3
FUSED = [name for name in FAMILIES if families.family(kind_of(name)).is_fused]
# All other families, as small as `make_small` makes them.
OTHERS = [
    kind
    for kind in sorted(families.CAUSAL.difference(map(kind_of, ALL), families.WRAPPERS))
    if families.family(kind).is_tested
]
# transformers' code of gpt_neox_japanese does not take the keys of several lanes at once.
RECORDED = [
    name
    for name in (*ALL, *OTHERS)
    if families.family(kind_of(name)).is_recorded and name != "gpt_neox_japanese"
]


def marked(names: Iterable[str], usual: Sequence[str] = USUAL) -> list[object]:
    """Return the names as parameters; all but the usual ones are slow together."""
    return [pytest.param(name, marks=() if name in usual else pytest.mark.slow) for name in names]


def check(
    name: str,
    folder: Path,
    backend: str,
    rows: Sequence[int] = (),
    fixed_rows: int | None = None,
) -> ModelExecutor:
    """Run sessions of two texts on a backend, and compare every row."""
    make_family(name, folder) if name in ALL else make_small(name, folder)
    loaded = load_model(str(folder), dtype="float32")
    executor = make_executor(
        *(loaded, CAPACITY),
        num_lanes=2,
        backend=backend,
        row_counts=rows,
        fixed_rows=fixed_rows,
    )
    if fixed_rows is not None:
        executor.set_total(CAPACITY)
    if executor.is_captured:
        executor.warm_up(())
    made = list(errors(executor, load(folder), seed=7))
    assert max(made) < TOLERANCE
    assert len(made) > 60
    assert executor.backend == backend
    return executor


@pytest.mark.parametrize("name", marked(WINDOWED, ("gemma3_text",)))
def test_without_their_windows_these_models_would_write_something_else(
    name: str, tmp_path: Path
) -> None:
    folder = make_family(name, tmp_path)
    field = "attention_chunk_size" if name == "llama4_text" else "sliding_window"
    texts = [
        greedy_text(load(folder, **fields), PROMPTS[1])
        for fields in ({}, {field: WINDOW}, {field: LENGTH})
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("name", marked([*ALL, *OTHERS]))
def test_trees_and_copies_have_the_logits_of_whole_texts(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, "reference")


@pytest.mark.parametrize("name", marked(WINDOWED, ("gemma3_text",)))
def test_so_they_have_in_reproducible_mode(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, "reference", fixed_rows=32)


@pytest.mark.parametrize("name", marked(FUSED, ("mistral-window",)))
def test_so_they_have_on_fused_operators(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, "fused")


@pytest.mark.parametrize("name", marked(RECORDED, ("gemma3_text", "mistral-window")))
def test_so_they_have_in_recordings(name: str, tmp_path: Path, device: StandIn) -> None:
    executor = check(name, tmp_path, "graphs", (8, 32))
    assert device.num_captures > 0
    assert (executor.num_late, executor.num_uncaptured) == (0, 0)
