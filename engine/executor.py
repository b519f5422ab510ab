"""Run the passes that a `SlotMap` lays out: one model, one cache, one session at a time.

Owns padding and rounding (which shapes reach the model) and the way from integers to tensors. Knows
no tree and no message. Two modes:

    normal        a pass has as many rows as it was given, or as many as the backend has a program
                  for; the number of visible slots is rounded up, to a multiple of 64 or more
    reproducible  `fixed_rows` = R: every pass but a prefill has R rows, the missing ones written to
                  scratch slots behind the cache, and `set_total` fixes the visible slots for a
                  session, so that a row's last bits do not depend on what it is computed with
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.compiled import CompiledBackend
from engine.device import send
from engine.errors import kind_of
from engine.forward import Backend, HuggingFaceBackend, Output
from engine.fused import FusedBackend
from engine.graphs import GraphBackend, captured_len
from engine.masks import MASK_BITS, as_words
from engine.model import LoadedModel
from engine.model_files import one_line
from engine.slots import Feed, Move

SLOT_STEP = 64
_NUM_TIMED = 3
CAPTURED_AT_LOAD = 4096  # slots; longer passes are captured when they first come


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass, ready to run; tensors on the CPU.

    rows         [5, n] int64, as in `Backend.forward`
    num_asked    rows whose logits are wanted
    keep         [num_asked] int64: which; None: the first of them
    is_padded    filled up to a number of rows that is fixed, or that there is a program for; the
                 logits of all rows are computed
    """

    rows: torch.Tensor
    num_visible: int
    num_asked: int
    keep: torch.Tensor | None
    is_padded: bool


class Executor:
    """A loaded model with a cache of `capacity` slots."""

    def __init__(
        self,
        loaded: LoadedModel,
        capacity: int,
        *,
        fixed_rows: int | None = None,
        backend: str = "reference",
        row_counts: Sequence[int] = (),
    ) -> None:
        """Allocate the cache; `fixed_rows` switches to reproducible mode.

        backend     reference, fused, compiled or graphs (`loading.make_executor` chooses)
        row_counts  for which a backend makes programs or graphs, ascending (but with `fixed_rows`)

        Raises:
            ModelError: the cache does not fit into memory, the model cannot run a token, or the
                backend does not cover it.
        """
        assert capacity > 0
        assert fixed_rows is None or 0 < fixed_rows <= MASK_BITS
        self.loaded = loaded
        self.capacity = capacity
        self.fixed_rows = fixed_rows
        self._num_too_large = 0  # decode passes of more rows than any graph has
        self._total: int | None = None  # visible slots of every pass; None: as the pass needs
        self._backend: Backend | None = _make_backend(
            backend, loaded, capacity, (fixed_rows,) if fixed_rows else tuple(row_counts)
        )

    @property
    def backend(self) -> str:
        """The name of the forward that runs."""
        assert self._backend is not None, "this executor was freed"
        return self._backend.name

    @property
    def num_uncaptured(self) -> int:
        """Decode passes that a captured backend had no recording for."""
        backend = self._backend
        return self._num_too_large + (backend.num_uncaptured if backend is not None else 0)

    def take_over(self) -> None:
        """Let the backend lay the weights out as it likes; the loaded model may not run again."""
        assert self._backend is not None, "this executor was freed"
        self._backend.take_over(timed=self.fixed_rows is None)

    def set_total(self, total: int | None) -> None:
        """Let every pass cover `total` slots (rounded up to 64) until told otherwise.

        None goes back to as many as each pass needs, which reproducible mode does not allow.
        """
        assert total is None or 0 < total <= self.capacity
        self._total = None if total is None else self._round_up(total)

    def run(self, feed: Feed, ask: Sequence[int]) -> torch.Tensor:
        """Run one pass: write its keys and values, return the logits of the rows named in `ask`.

        Returns [len(ask), V] float32 on the model's device, in the order of `ask`, which may be
        empty: what nobody asks for is not computed (but for padded passes, which are all alike).
        """
        return self.forward(self.lay_out(feed, ask)).logits

    def lay_out(self, feed: Feed, ask: Sequence[int]) -> Pass:
        """The first half of `run`, on the host: from integers to tensors."""
        assert max(feed.positions) < self.loaded.max_model_len, "beyond the model's positions"
        num_visible = self._num_visible(feed)
        keep = None if _is_all(ask, len(feed.tokens)) else torch.tensor(ask, dtype=torch.int64)
        slots = np.array(feed.slots, dtype=np.int64)
        rows = np.empty((5, len(slots)), dtype=np.int64)
        rows[0], rows[1], rows[2] = feed.tokens, feed.positions, slots
        rows[3:] = as_words(slots, feed.prefix_len, feed.masks)
        count = None if feed.masks is None else self._count_for(len(slots))
        if feed.masks is not None and count is None and self._is_captured:
            self._num_too_large += 1
        if count is not None:
            rows = self._pad(rows, count)
        return Pass(torch.from_numpy(rows), num_visible, len(ask), keep, count is not None)

    def forward(self, step: Pass, *, with_hidden: bool = False) -> Output:
        """The second half of `run`: the model.

        Returns logits float32, as `run` does, and hidden states in the model's type if asked.

        Raises:
            ModelError: the backend does not give hidden states.
        """
        assert self._backend is not None, "this executor was freed"
        keep, num_asked = step.keep, step.num_asked
        out = self._backend.forward(
            step.rows,
            num_visible=step.num_visible,
            keep=None if step.is_padded else keep,
            with_hidden=with_hidden,
        )
        logits, hidden = out.logits, out.hidden
        if step.is_padded:
            which = slice(num_asked) if keep is None else send(keep, logits.device)
            logits, hidden = logits[which], None if hidden is None else hidden[which]
        return Output(logits.float(), hidden)

    def move(self, move: Move) -> None:
        """Copy cache slots as `SlotMap.advance` says."""
        assert self._backend is not None, "this executor was freed"
        self._backend.move(move)

    def warm_up(self, row_counts: Iterable[int]) -> dict[int, float]:
        """Run passes of each number of rows, so that no session pays for a first time.

        A captured backend runs each shape up to `CAPTURED_AT_LOAD` slots. Overwrites the first
        slots: only before a session. Returns the seconds of a pass by its rows, over few slots.
        """
        seconds: dict[int, float] = {}
        total, row_counts = self._total, tuple(row_counts)
        totals = [total or self._round_up(1)]
        if self._is_captured:
            assert self._backend is not None
            row_counts = self._backend.row_counts
            while total is None and totals[-1] < min(self.capacity, CAPTURED_AT_LOAD):
                totals.append(self._round_up(totals[-1] + 1))
        for self._total in totals:
            for num_rows in row_counts:
                where = tuple(range(num_rows))
                masks = tuple((2 << i) - 1 for i in where)
                feed = Feed((0,) * num_rows, where, where, 0, masks)
                self.run(feed, where)
                took_s = min(self._seconds_of(feed) for _ in range(_NUM_TIMED))
                seconds[num_rows] = min(took_s, seconds.get(num_rows, took_s))
        self._total = total
        if self._backend is not None:
            self._backend.is_loading = False
        return seconds

    def _seconds_of(self, feed: Feed) -> float:
        """What a pass takes until one of its numbers is on the host."""
        started = time.perf_counter()
        self.run(feed, range(len(feed.tokens)))[0, 0].item()
        return time.perf_counter() - started

    def free(self) -> None:
        """Give the cache's memory back; nothing can be run afterwards."""
        self._backend = None

    @property
    def _is_captured(self) -> bool:
        return self._backend is not None and self._backend.is_captured

    def _round_up(self, total: int) -> int:
        rounded = captured_len(total) if self._is_captured else -(-total // SLOT_STEP) * SLOT_STEP
        return min(rounded, self.capacity)

    def _num_visible(self, feed: Feed) -> int:
        needed = feed.total
        assert needed <= self.capacity, f"{needed} slots, but the cache has {self.capacity}"
        if self._total is None:
            assert self.fixed_rows is None, "reproducible mode needs set_total"
            return self._round_up(needed)
        assert needed <= self._total, f"{needed} slots, but the session was set to {self._total}"
        return self._total

    def _count_for(self, num_rows: int) -> int | None:
        """Up to how many rows a pass is filled; None: it runs as it is."""
        if self.fixed_rows is not None:
            return self.fixed_rows
        assert self._backend is not None, "this executor was freed"
        return next((n for n in self._backend.row_counts if n >= num_rows), None)

    def _pad(self, rows: Any, count: int) -> Any:
        """Fill up to `count` rows: copies of the first that write to scratch slots."""
        num_rows = rows.shape[1]
        assert num_rows <= count, f"{num_rows} rows, but reproducible mode is fixed at {count}"
        if num_rows == count:
            return rows
        padded = np.empty((5, count), dtype=np.int64)
        padded[:, :num_rows] = rows
        padded[:, num_rows:] = rows[:, :1]
        padded[2, num_rows:] = self.capacity + np.arange(count - num_rows)
        return padded


def _make_backend(
    name: str, loaded: LoadedModel, capacity: int, row_counts: tuple[int, ...]
) -> Backend:
    assert name in ("compiled", "fused", "graphs", "reference")
    # Rows that fill a pass up write to slots of their own.
    num_slots = capacity + max(row_counts, default=0)
    try:
        if name == "compiled":
            return CompiledBackend(loaded, num_slots, row_counts)
        if name == "graphs":
            return GraphBackend(loaded, num_slots, row_counts)
        if name == "fused":
            return FusedBackend(loaded, num_slots)
        return HuggingFaceBackend(loaded, num_slots)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
    ) as error:
        raise kind_of(error)(
            f"{loaded.name}: no cache of {num_slots} slots on {loaded.device} "
            f"({one_line(error)}); try a shorter maximum length, or another model"
        ) from error


def _is_all(ask: Sequence[int], num_rows: int) -> bool:
    return len(ask) == num_rows and all(row == i for i, row in enumerate(ask))
