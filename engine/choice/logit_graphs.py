"""Record small computations over logits as CUDA graphs, and replay them after a forward pass.

A recording (CUDA graph) reads fixed addresses. Logits that lie where recorded passes write theirs
are read there; other logits are first copied to a fixed buffer. The integers that differ from pass
to pass are sent. So that few recordings are needed, they exist for only a few numbers of rows; a
computation of fewer rows is padded and the results of the padding are dropped. Owns the decision
which computations are worth a recording. Knows neither passes nor choices.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch

from engine.device import send

Compute = Callable[[torch.Tensor], torch.Tensor]
"""Function: integers on the device -> result tensor"""
Record = Callable[[Compute, torch.Tensor], Compute]
"""Function: (computation, example integers on the CPU) -> its recording for such integers"""
Work = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function: (logits [n, V], integers [k] on the same device) -> result tensor"""

# Recording costs the time of some passes: the first uses of a computation run kernel by kernel.
USES_BEFORE = 2
_NEVER = -(1 << 60)  # count of uses of a computation that cannot be recorded
_MOST_KEPT = 512
_MOST_PLACES = 4  # most buffers for copied logits
Key = tuple[Hashable, int, int, bool]
"""Of a recording: computation's name, rows, V, whether it reads logits where passes write them"""


class Captures:
    """The recorded computations over logits of one device."""

    def __init__(
        self, record: Record, row_counts: Sequence[int] = (), logits: torch.Tensor | None = None
    ) -> None:
        """Prepare to record computations, without recording any yet.

        record      function that records a computation
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
        self._uses: OrderedDict[Key, int] = OrderedDict()
        self._made: OrderedDict[Key, Compute] = OrderedDict()

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
        num_rows, first = len(logits), self._first_row(logits)
        in_place = first is not None
        start = first or 0
        count = self._count_for(start + num_rows)
        place = None if count is None else self._place(logits, count, in_place=in_place)
        if count is None or place is None:
            return work(logits, send(integers, logits.device))
        filled = integers
        if count > num_rows:
            filled = integers.new_zeros(count + len(integers) - num_rows)
            filled[start : start + num_rows] = integers[:num_rows]
            filled[count:] = integers[num_rows:]
        replay = self._replay((name, count, logits.shape[1], in_place), work, place, filled)
        if replay is None:
            return work(logits, send(integers, logits.device))
        if not in_place:
            place[:num_rows].copy_(logits)
        return replay(filled)[start : start + num_rows]

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

    def _place(self, logits: torch.Tensor, count: int, *, in_place: bool) -> torch.Tensor | None:
        """Return the buffer [count, V] that a recording of `count` rows reads; None: there is none.

        in_place  True: the buffer of recorded passes; False: one for copied logits
        """
        if in_place:
            assert self._logits is not None
            return self._logits[:count] if len(self._logits) >= count else None
        key = max(self._row_counts, default=count), logits.shape[1]
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= _MOST_PLACES:
                return None
            place = self._places[key] = logits.new_zeros(key)
        return place[:count]

    def _replay(
        self, key: Key, work: Work, place: torch.Tensor, integers: torch.Tensor
    ) -> Compute | None:
        """Return the recording for `key`, made now if it was used often enough; else None."""
        made = self._made.get(key)
        if made is not None:
            self._made.move_to_end(key)
            return made
        uses = self._uses[key] = self._uses.pop(key, 0) + 1
        if len(self._uses) > _MOST_KEPT:
            self._uses.popitem(last=False)
        if uses <= USES_BEFORE:
            return None
        try:
            made = self._record(lambda there: work(place, there), integers)
        except RuntimeError:
            self._uses[key] = _NEVER  # a kernel of this one cannot be captured, or memory lacked
            return None
        self._made[key] = made
        if len(self._made) > _MOST_KEPT:
            # It is not running: the device is idle when something is recorded.
            self._made.popitem(last=False)
        return made
