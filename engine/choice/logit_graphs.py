"""Small computations over logits as recordings, replayed behind the pass that made the logits.

What a recording reads lies where it always lies: logits that lie where recorded passes leave them
are read there, others are copied to a place of their own first; the integers that differ from pass
to pass are sent. So that few are needed, a recording has one of a few numbers of rows; what it
says of those that nobody asked for is left out. What is not recorded has the same numbers of rows:
by them a GPU's kernels are chosen. Owns which computations are worth a recording.
Knows neither passes nor choices.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch

from engine.device import send

Compute = Callable[[torch.Tensor], torch.Tensor]
"""Integers on the device -> result"""
Record = Callable[[Compute, torch.Tensor], Compute]
"""(what to record, its integers on the CPU) -> the same, for integers on the CPU"""
Work = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [n, V], integers [k] on the same device) -> result"""

# A recording costs some passes' time: what comes once or twice is run kernel by kernel.
USES_BEFORE = 2
_NEVER = -(1 << 60)  # uses so far of what cannot be recorded
_MOST_KEPT = 512
_MOST_PLACES = 4  # for logits that are copied: of all tokens, and of those that a target knows
Key = tuple[Hashable, int, int, bool]
"""Of a recording: what it does, rows, tokens, whether it reads logits where passes leave them"""


class Captures:
    """The recordings over logits of one device."""

    def __init__(
        self,
        record: Record | None,
        row_counts: Sequence[int] = (),
        logits: torch.Tensor | None = None,
    ) -> None:
        """Record nothing yet.

        record      None: the same is done kernel by kernel
        row_counts  ascending; other numbers of rows are filled up. Empty: each number has
                    a recording of its own
        logits      [n, V] where recorded passes leave theirs
        """
        self._record = record
        self._row_counts = tuple(row_counts)
        self._logits = logits
        # For logits that are copied, by rows and tokens.
        self._places: dict[tuple[int, int], torch.Tensor] = {}
        self._uses: OrderedDict[Key, int] = OrderedDict()
        self._made: OrderedDict[Key, Compute] = OrderedDict()

    def run(
        self, name: Hashable, work: Work, logits: torch.Tensor, integers: torch.Tensor
    ) -> torch.Tensor:
        """Return work(logits, integers), valid until the next call.

        work      says of each row one row; the first integers are the rows', one each
        name      of the work: another name for other numbers in it
        integers  [n + k] int64 on the CPU
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
        if not in_place:
            place[:num_rows].copy_(logits)
        replay = self._replay((name, count, logits.shape[1], in_place), work, place, filled)
        # Without a recording as many rows as with one: kernels are chosen by that, and last bits.
        made = work(place, send(filled, logits.device)) if replay is None else replay(filled)
        return made[start : start + num_rows]

    def _count_for(self, num_rows: int) -> int | None:
        """How many rows the recording for so many has; None: there is none."""
        if not self._row_counts:
            return num_rows
        return next((count for count in self._row_counts if count >= num_rows), None)

    def _first_row(self, logits: torch.Tensor) -> int | None:
        """Which row, of where recorded passes leave their logits, is the first of these.

        None: they lie elsewhere, or too far behind for a recording to begin at the first of all.
        """
        there = self._logits
        if there is None or logits.shape[1:] != there.shape[1:]:
            return None
        first = (logits.data_ptr() - there.data_ptr()) // max(there[:1].nbytes, 1)
        is_near = first >= 0 and self._count_for(first + len(logits)) is not None
        return first if is_near and logits.stride() == there.stride() else None

    def _place(self, logits: torch.Tensor, count: int, *, in_place: bool) -> torch.Tensor | None:
        """Where a recording of `count` rows reads [count, V]; None: there is no place for it."""
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
        """The recording of this key, which is made if it has come often enough."""
        if self._record is None:
            return None
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
            # Nothing runs it: a device has ended all that it was given before it records.
            self._made.popitem(last=False)
        return made
