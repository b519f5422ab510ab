"""Small computations over logits as recordings, replayed behind the pass that made the logits.

What a recording reads lies where it always lies: so logits are copied there, and the integers that
differ from pass to pass are sent there. Owns which computations are worth a recording. Knows
neither passes nor choices.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable

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
_MOST_KEPT = 64


class Captures:
    """The recordings over logits of one device."""

    def __init__(self, record: Record) -> None:
        self._record: Record | None = record
        self._uses: OrderedDict[Hashable, int] = OrderedDict()
        self._made: OrderedDict[Hashable, tuple[torch.Tensor, Compute]] = OrderedDict()

    def run(
        self, name: Hashable, work: Work, logits: torch.Tensor, integers: torch.Tensor
    ) -> torch.Tensor:
        """Return work(logits, integers), valid until the next call.

        name      of the work: another name for other numbers in it
        integers  [k] int64 on the CPU
        """
        key = name, logits.shape, len(integers)
        made = self._made.get(key) or self._maybe_recorded(key, work, logits, integers)
        if made is None:
            return work(logits, send(integers, logits.device))
        self._made.move_to_end(key)
        kept, replay = made
        kept.copy_(logits)
        return replay(integers)

    def _maybe_recorded(
        self, key: Hashable, work: Work, logits: torch.Tensor, integers: torch.Tensor
    ) -> tuple[torch.Tensor, Compute] | None:
        uses = self._uses[key] = self._uses.pop(key, 0) + 1
        if len(self._uses) > _MOST_KEPT:
            self._uses.popitem(last=False)
        if uses <= USES_BEFORE or self._record is None:
            return None
        kept = logits.clone()
        try:
            replay = self._record(lambda there: work(kept, there), integers)
        except RuntimeError:
            self._record = None  # some kernel cannot be captured here: never again
            return None
        made = self._made[key] = kept, replay
        if len(self._made) > _MOST_KEPT:
            self._made.popitem(last=False)
        return made
