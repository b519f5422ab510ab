"""From how many slots on a captured pass has its attention split over the keys: timed at load.

Few slots are looked through by one call of the usual kernel in less time than it takes to put the
shares of many thread blocks together; of many slots it leaves most of the device idle. Where the
limit lies depends on the model and the device. Owns which passes are timed; captures nothing.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from engine.errors import ModelError
from engine.flex_attention import Shape
from engine.forward import Spans
from engine.lanes import Lanes, Span
from engine.timing import quickest

logger = logging.getLogger(__name__)

TIMED_SLOTS = (256, 1024, 4096)  # visible; the last as far as the masked form is captured at load
EVERY_LENGTH = 0  # in place of a number of slots: what is captured serves all of them

Capture = Callable[[torch.Tensor, Spans, int], Callable[[torch.Tensor], torch.Tensor]]
"""(the integers of a pass, its lanes, visible slots or EVERY_LENGTH) -> a pass of such integers"""


def find_splits(
    make: Callable[[Shape], None], capture: Capture, lanes: Lanes, row_counts: Sequence[int]
) -> dict[Shape, int]:
    """Return from how many visible slots on a pass is better split, by its shape.

    make  compiles what a shape needs
    row_counts  for which passes are captured, ascending

    What is missing is better never split, or cannot be: the log says why. Runs passes in all lanes:
    only before a session.
    """
    capacity = lanes.num_slots - max(row_counts)
    found: dict[Shape, int] = {}
    for shape in _shapes(lanes.count, row_counts):
        spans = tuple(Span(lanes.first_slot(lane), shape[1]) for lane in range(shape[0]))
        try:
            make(shape)
            least = _split_from(capture, spans, capacity)
        except ModelError as error:
            logger.info("attention of %d x %d rows keeps its mask: %s", *shape, error)
            continue
        if least is not None:
            found[shape] = least
        logger.info("attention of %d x %d rows is split from %s slots on", *shape, least)
    return found


def _shapes(num_lanes: int, row_counts: Sequence[int]) -> Iterator[Shape]:
    """The shapes of captured passes: of one lane, and of the first 2, 4, 8, ..."""
    counts = sorted({min(1 << power, num_lanes) for power in range(num_lanes.bit_length() + 1)})
    return ((count, num_rows) for count in counts for num_rows in row_counts)


def _split_from(capture: Capture, spans: Spans, capacity: int) -> int | None:
    """Try the longest text, and then ever longer ones until splitting is the faster way."""
    split = capture(_chains(spans, capacity), spans, EVERY_LENGTH)

    def is_better(num_visible: int) -> bool:
        rows = _chains(spans, num_visible)
        masked = capture(rows, spans, num_visible)
        forms = {"masked": partial(_run, masked), "split": partial(_run, split)}
        return quickest(forms, rows) == "split"

    if not is_better(capacity):
        return None
    shorter = [num_slots for num_slots in TIMED_SLOTS if num_slots < capacity]
    for number, num_slots in enumerate(shorter):
        if is_better(num_slots):
            return num_slots if number else EVERY_LENGTH
    return shorter[-1] + 1 if shorter else EVERY_LENGTH


def _run(captured: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> float:
    """Run a pass until one of its numbers is on the host."""
    return float(captured(rows)[0, 0])


def _chains(spans: Spans, num_visible: int) -> torch.Tensor:
    """A chain at the end of `num_visible` slots of each lane, as in `Backend.forward`."""
    count = spans[0].num_rows
    step = torch.arange(count).repeat(len(spans))
    first = torch.tensor([span.first_slot for span in spans]).repeat_interleave(count)
    prefix = torch.full_like(step, num_visible - count)
    nothing = torch.zeros_like(step)
    return torch.stack((nothing, nothing, first + prefix + step, prefix, (2 << step) - 1))
