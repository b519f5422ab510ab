"""Record small computations over logits as CUDA graphs, and replay them after a forward pass.

What a recording reads lies where it always lies: logits that lie where recorded passes leave them
are read there, others are copied to a place of their own first; the integers that differ from pass
to pass are sent. So that few are needed, a recording has one of a few numbers of rows; what it
says of those that nobody asked for is left out. What is not recorded has the same numbers of rows:
by them a GPU's kernels are chosen. Recordings are made at load alone: to make one stops the device
for longer than some fifty small kernels take one by one, and that is how whatever has none is run.
Knows neither passes nor choices.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from engine.checkpoint.files import one_line
from engine.device import send

logger = logging.getLogger(__name__)

Compute = Callable[[torch.Tensor], torch.Tensor]
"""Integers on the device -> result"""


class Record(Protocol):
    """What makes recordings."""

    def __call__(
        self, compute: Compute, integers: torch.Tensor, /, *, is_warm: bool = False
    ) -> Compute:
        """Record `compute`; the result takes integers on the CPU, as many as these.

        is_warm  the same kernels have run for this recorder: they are not run before they are
                 recorded
        """


Work = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function: (logits [n, V], integers [k] on the same device) -> result tensor"""

Key = tuple[Hashable, int, int, bool]
"""Of a recording: computation's name, rows, V, whether it reads logits where passes write them"""


class Captures:
    """The recorded computations over logits of one device."""

    def __init__(
        self,
        record: Record | None,
        row_counts: Sequence[int] = (),
        logits: torch.Tensor | None = None,
    ) -> None:
        """Prepare to record computations, without recording any yet.

        record      None: the same is done kernel by kernel
        row_counts  ascending; other numbers of rows are filled up. Empty: each number has
                    a recording of its own
        logits      [n, V] where recorded passes leave theirs
        """
        self._record = record
        self._row_counts = tuple(row_counts)
        self._logits = logits
        # (rows, V) -> the buffer into which other logits are copied.
        self._places: dict[tuple[int, int], torch.Tensor] = {}
        self._made: dict[Key, Compute] = {}

    def record(
        self, name: Hashable, work: Work, logits: torch.Tensor, integers: torch.Tensor
    ) -> None:
        """Record `work` for logits that lie as these do, of so many rows or a few less.

        Only at load; the arguments are those of `run`. What cannot be recorded has no recording.
        """
        start, count, key = self._find(name, logits)
        if self._record is None or count is None or key in self._made:
            return
        place = self._place(logits, count, in_place=key[3])
        filled = _filled(integers, len(logits), start, count)
        try:
            self._made[key] = self._record(lambda there: work(place, there), filled)
        except RuntimeError as error:  # a kernel of it cannot be captured, or memory lacked
            logger.info("%s is not recorded: %s", name, one_line(error))

    def run(
        self, name: Hashable, work: Work, logits: torch.Tensor, integers: torch.Tensor
    ) -> torch.Tensor:
        """Return work(logits, integers), replayed from a recording if there is one.

        The result is valid until the next call.

        name      identifies the computation, including any constants in it
        work      the computation; it returns one row for each row of logits
        logits    [n, V] on the device
        integers  [n + k] int64 on the CPU: one for each row, then k others
        """
        start, count, key = self._find(name, logits)
        if count is None:
            return work(logits, send(integers, logits.device))
        num_rows = len(logits)
        place = self._place(logits, count, in_place=key[3])
        if not key[3]:
            place[:num_rows].copy_(logits)
        filled = _filled(integers, num_rows, start, count)
        replay = self._made.get(key)
        # Without a recording as many rows as with one: kernels are chosen by that, and last bits.
        made = work(place, send(filled, logits.device)) if replay is None else replay(filled)
        return made[start : start + num_rows]

    def _find(self, name: Hashable, logits: torch.Tensor) -> tuple[int, int | None, Key]:
        """Where logits begin in what a recording reads, how many rows that has, and which it is."""
        first = self._first_row(logits)
        start = first or 0
        count = self._count_for(start + len(logits))
        return start, count, (name, count or 0, logits.shape[1], first is not None)

    def _count_for(self, num_rows: int) -> int | None:
        """Return the number of rows to which `num_rows` is padded; None: it exceeds all of them."""
        if not self._row_counts:
            return num_rows
        return next((count for count in self._row_counts if count >= num_rows), None)

    def _first_row(self, logits: torch.Tensor) -> int | None:
        """Return the row of the recorded passes' buffer at which `logits` begins, or None.

        None: the logits lie elsewhere, or so far behind the buffer's beginning, where recordings
        start to read, that no recording has enough rows.
        """
        there = self._logits
        if there is None or logits.shape[1:] != there.shape[1:]:
            return None
        first = (logits.data_ptr() - there.data_ptr()) // max(there[:1].nbytes, 1)
        is_near = first >= 0 and self._count_for(first + len(logits)) is not None
        return first if is_near and logits.stride() == there.stride() else None

    def _place(self, logits: torch.Tensor, count: int, *, in_place: bool) -> torch.Tensor:
        """Where a recording of `count` rows reads [count, V]."""
        if in_place:
            assert self._logits is not None
            return self._logits[:count]
        key = max(self._row_counts, default=count), logits.shape[1]
        if key not in self._places:
            self._places[key] = logits.new_zeros(key)
        return self._places[key][:count]


def _filled(integers: torch.Tensor, num_rows: int, start: int, count: int) -> torch.Tensor:
    """Integers [num_rows + k] as `count` rows have them, of which `start` are others before."""
    if count == num_rows:
        return integers
    filled = integers.new_zeros(count + len(integers) - num_rows)
    filled[start : start + num_rows] = integers[:num_rows]
    filled[count:] = integers[num_rows:]
    return filled
