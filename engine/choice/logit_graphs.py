"""Record small computations over logits as CUDA graphs, and replay them after a forward pass.

A recording (CUDA graph) reads fixed addresses. Logits that lie where recorded passes write theirs
are read there; other logits are first copied to a fixed buffer. The integers that differ from pass
to pass are sent. So that few recordings are needed, they exist for only a few numbers of rows; a
computation of fewer rows is padded and the results of the padding are dropped. Computations without
a recording are padded to the same numbers of rows, because a GPU's kernels are chosen by them.
Recordings are made only at load: making one stops the device for longer than running some fifty
small kernels one by one, which is how a computation without a recording is run. Knows neither
passes nor choices.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from engine.checkpoint.files import one_line
from engine.device import send

logger = logging.getLogger(__name__)

Compute = Callable[[torch.Tensor], torch.Tensor]
"""Function: integers on the device -> result tensor"""


class Record(Protocol):
    """Function that records a computation."""

    def __call__(
        self, compute: Compute, integers: torch.Tensor, /, *, is_warm: bool = False
    ) -> Compute:
        """Return a recording of `compute`, which takes as many integers, on the CPU.

        integers  example integers on the CPU
        is_warm   True: the same kernels have run for this recorder before, so they are not run
                  before they are recorded
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

        record      function that records a computation; None: nothing is recorded, and computations
                    run kernel by kernel
        row_counts  the numbers of rows that recordings have, ascending; a computation of fewer rows
                    is padded to the next. (): each number of rows has its own recording
        logits      [n, V] the buffer into which recorded passes write their logits; None: there is
                    none
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
        """Record a computation for logits in the same place, with as many rows after padding.

        Call it only at load; arguments as for `run`. If it cannot be recorded, that is logged, and
        `run` will run it kernel by kernel.
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
        """Return work(logits, integers), replayed if recorded; it is valid until the next call.

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
        # Padded without a recording too: the number of rows decides which kernels run, and so the
        # last bits.
        made = work(place, send(filled, logits.device)) if replay is None else replay(filled)
        return made[start : start + num_rows]

    def _find(self, name: Hashable, logits: torch.Tensor) -> tuple[int, int | None, Key]:
        """Return (first row of `logits` in the buffer that is read, padded number of rows, key)."""
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
        """Return the buffer [count, V] that a recording of `count` rows reads.

        in_place  True: the buffer of recorded passes; False: one for copied logits
        """
        if in_place:
            assert self._logits is not None
            return self._logits[:count]
        key = max(self._row_counts, default=count), logits.shape[1]
        if key not in self._places:
            self._places[key] = logits.new_zeros(key)
        return self._places[key][:count]


def _filled(integers: torch.Tensor, num_rows: int, start: int, count: int) -> torch.Tensor:
    """Return integers [num_rows + k] padded to [count + k]: `start` rows before, others after."""
    if count == num_rows:
        return integers
    filled = integers.new_zeros(count + len(integers) - num_rows)
    filled[start : start + num_rows] = integers[:num_rows]
    filled[count:] = integers[num_rows:]
    return filled
