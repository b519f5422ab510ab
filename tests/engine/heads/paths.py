"""Passes of a head whose rows are compared with rows that are computed plainly."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Protocol

import torch

from engine.heads.eagle import EagleExecutor
from engine.heads.head_loading import LoadedHead
from engine.layout.slots import Move
from tests.engine.heads.conftest import feature
from tests.engine.heads.plain import Given
from tests.engine.random_session import Drawn, Path


class Plain(Protocol):
    """A head row by row: `PlainHead`, or a layer for multi-token prediction."""

    def row(self, above: Sequence[Any], token: int, given: Given) -> Any:
        """The row of a token behind the rows `above`; None if it is absent."""

    def logits(self, row: Any) -> torch.Tensor:
        """[V] of the target's vocabulary."""


# Relative to the largest logit of a row.
TOLERANCE = 1e-4
CAPACITY = 256


def as_bytes(given: Given) -> bytes | None:
    return given.numpy().tobytes() if isinstance(given, torch.Tensor) else given


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same logits [V], the same tokens ruled out, and the same one chosen."""
    real = want.isfinite()
    assert torch.equal(got.isfinite(), real)
    assert (got - want)[real].abs().max() < TOLERANCE * want[real].abs().max()
    assert got.argmax() == want.argmax()


class Paths:
    """The plain rows of one text's tree, by their whole path from the start of the text."""

    def __init__(self, head: Plain) -> None:
        self._head = head
        self.rows: dict[Path, Any] = {}

    def feed(self, path: Path, given: Given) -> torch.Tensor | None:
        """The row of a path, made of those above it as they are now; its logits."""
        above = [self.rows[path[:length]] for length in range(1, len(path))]
        row = self.rows[path] = self._head.row(above, path[-1], given)
        return None if row is None else self._head.logits(row)


def run(executor: EagleExecutor, step: Drawn, given: list[Given], plain: Paths) -> int:
    """Run a pass with these features and compare its rows; returns how many were not absent."""
    feed = replace(step.feed, features=tuple(map(as_bytes, given)))
    logits = executor.run(feed, range(len(step.paths)))
    wanted = [plain.feed(path, one) for path, one in zip(step.paths, given, strict=True)]
    assert bool(torch.isfinite(logits.clamp(min=-1e9)).all())
    for got, want in zip(logits, wanted, strict=True):
        if want is not None:
            assert_close(got, want)
    return sum(want is not None for want in wanted)


def features_of(loaded: LoadedHead, path: Path) -> torch.Tensor:
    """The target's feature before a path's last token: the same each time."""
    return feature(zlib.crc32(repr(path[:-1]).encode()), loaded.feature_size)


def compare(
    executor: EagleExecutor, steps: Iterable[Drawn | Move], plain: Paths, seed: int
) -> tuple[int, int, int]:
    """Run a session, of whose rows some features are given, some predicted, some unknown.

    Returns the numbers of moves, of rows that were compared, and of absent ones.
    """
    random = Random(seed)
    num_moves = num_there = num_absent = 0
    for step in steps:
        if isinstance(step, Move):
            executor.move(step)
            num_moves += 1
            continue
        given: list[Given] = []
        for path in step.paths:
            kind = random.choices((0, 1, 2), (12, 6, 1))[0]
            given.append((features_of(executor.loaded, path), b"", None)[kind])
        there = run(executor, step, given, plain)
        num_there, num_absent = num_there + there, num_absent + len(given) - there
    return num_moves, num_there, num_absent
