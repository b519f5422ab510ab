"""Attention split over the keys, for GPUs: torch's FlexAttention with the mask of a tree.

One call of the usual kernel has a thread block per lane and key head, however long the text is.
This one has as many as the device takes, each with a share of the keys that are visible. What is
visible are numbers on the device, the two words of each row (`masks.as_words`) and how many blocks
of slots they reach: so a program of so many rows serves every length, and what it takes goes by
what the rows see and not by what the cache could hold.

Each program is held to the masked form on random keys before it is used: those of one lane at load,
those of several when they are first wanted. Owns
the programs; knows no layer and no model.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.checkpoint.files import one_line
from engine.errors import ModelError
from engine.forward.forward import Spans
from engine.forward.masks import MASK_BITS, from_words
from engine.forward.operators import quickest, side_by_side
from engine.layout.slots import LaneLayout, Span

# -- flex attention --------------------------------------------------------------------------------

BLOCK = 128  # slots that are skipped or read together
SPLIT_DEVICES = ("cuda",)  # on a CPU a program takes 10 s to compile and is slower for short texts
_QUERIES = 128  # of one program: beyond that FlexAttention does not split over the keys
_MOST_PROGRAMS = 64
# Of the masked form: both sum in float32, in another order, and round to the type once.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
# What torch.compile raises where it, or a compiler that it calls, cannot do something.
_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    ImportError,
    OSError,
)

Program = Callable[..., torch.Tensor]
Shape = tuple[int, int]
"""(lanes, rows of each) of a pass"""


@dataclass(frozen=True, slots=True)
class Visible:
    """What the queries of one call see; on their device.

    words       [2, lanes, n * group] int64: of each query a prefix, and 64 slots behind it
    num_blocks  [lanes, 1, 1] int32: of slots, up to the last that any query of a lane may see
    """

    words: torch.Tensor
    num_blocks: torch.Tensor


class FlexAttention:
    """The programs for lanes of `num_slots` slots, where `group` query heads share a key head."""

    def __init__(self, num_slots: int, group: int) -> None:
        self._num_slots = num_slots
        self._group = group
        self._program: Program | None = None
        self._indices: dict[int, torch.Tensor] = {}  # by lanes
        self.made: set[Shape] = set()

    def takes(self, num_rows: int) -> bool:
        """Whether FlexAttention splits a pass of so many rows a lane over the keys."""
        return num_rows * self._group < _QUERIES

    def see(self, words: torch.Tensor, num_lanes: int) -> Visible:
        """Return what `words` [2, lanes * n], as `masks.as_words` says, let the queries see."""
        by_lane = words.reshape(2, num_lanes, -1)
        reached = by_lane[0].amax(1) + (MASK_BITS + BLOCK - 1)
        num_blocks = (reached // BLOCK).clamp(max=-(-self._num_slots // BLOCK))
        queries = by_lane.repeat_interleave(self._group, dim=2) if self._group > 1 else by_lane
        return Visible(queries, num_blocks.to(torch.int32).view(num_lanes, 1, 1))

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: Visible,
        scale: float,
    ) -> torch.Tensor:
        """Return the outputs, of the query's shape.

        query         [lanes, kv_heads, n * group, dim]: the query heads of a group side by side
        keys, values  [lanes, kv_heads, num_slots, dim]
        """
        assert self._program is not None, "no program was made"
        indices = self._indices_for(len(query), query.device)
        words, num_blocks = visible.words, visible.num_blocks
        return self._program(query, keys, values, words, num_blocks, indices, scale)

    def make(self, shape: Shape, keys: torch.Tensor, values: torch.Tensor, scale: float) -> None:
        """Compile the program for passes of `shape`, and hold it to the masked form.

        keys, values  [lanes, kv_heads, num_slots, dim]: any numbers; none are changed

        Raises:
            ModelError: it cannot be compiled here, or computes something else.
        """
        # It takes seconds to import, which only whoever compiles has to pay.
        import torch._dynamo
        import torch._inductor.config

        assert len(self.made) < _MOST_PROGRAMS
        self._program = self._program or _compiled()
        try:
            with (
                torch._dynamo.config.patch(recompile_limit=_MOST_PROGRAMS),
                # In this process: workers of a pool would outlive what they are for.
                torch._inductor.config.patch(compile_threads=1),
            ):
                error = self._error(shape, keys, values, scale)
        except _FAILURES as failure:
            raise ModelError(f"FlexAttention cannot be compiled ({one_line(failure)})") from failure
        if not error <= _TOLERANCES[keys.dtype]:
            raise ModelError(f"FlexAttention gives other numbers (relative error {error:.1e})")
        self.made.add(shape)

    def _error(self, shape: Shape, keys: torch.Tensor, values: torch.Tensor, scale: float) -> float:
        """The largest difference from the masked form, relative to the largest output."""
        num_lanes, num_rows = shape
        worst = 0.0
        size = num_lanes, keys.shape[1], num_rows * self._group, keys.shape[3]
        random = torch.Generator().manual_seed(num_rows)
        query = torch.randn(size, generator=random).to(keys)
        for share in (0.0, 0.5, 1.0):  # of the cache that the prefix fills
            words = self._random_words(shape, share, random).to(keys.device)
            got = self.attend(query, keys, values, self.see(words, num_lanes), scale)
            mask = from_words(words, self._num_slots, keys.dtype).view(num_lanes, 1, num_rows, -1)
            mask = mask.repeat_interleave(self._group, dim=2)
            want = side_by_side(query, keys, values, mask, scale)
            worst = max(worst, float((got - want).abs().amax() / want.abs().amax()))
        return worst

    def _random_words(self, shape: Shape, share: float, random: torch.Generator) -> torch.Tensor:
        """Words [2, lanes * n] of trees behind prefixes that differ by a few slots."""
        num_lanes, num_rows = shape
        longest = max(self._num_slots - MASK_BITS, 1)
        prefix = 1 + int(share * (longest - 1)) - torch.arange(num_lanes) % 3
        shown = prefix.clamp(1, longest).repeat_interleave(num_rows)
        largest = torch.iinfo(torch.int64).max
        bits = torch.randint(-largest, largest, (num_lanes * num_rows,), generator=random)
        return torch.stack((shown, bits))

    def _indices_for(self, num_lanes: int, device: torch.device) -> torch.Tensor:
        """Return the blocks of each lane in their order [lanes, 1, 1, blocks] int32."""
        made = self._indices.get(num_lanes)
        if made is None:
            blocks = torch.arange(-(-self._num_slots // BLOCK), dtype=torch.int32, device=device)
            made = self._indices[num_lanes] = blocks.repeat(num_lanes, 1, 1, 1)
        return made


def sees(
    words: torch.Tensor, lane: torch.Tensor, query: torch.Tensor, slot: torch.Tensor
) -> torch.Tensor:
    """Whether a query sees a slot: the mask of `masks.from_words`, element by element.

    words  [2, lanes, queries] int64
    """
    behind = slot - words[0, lane, query]
    bit = words[1, lane, query] >> behind.clamp(0, MASK_BITS - 1) & 1
    return (behind < 0) | (behind < MASK_BITS) & (bit == 1)


def _compiled() -> Program:
    return cast(Program, torch.compile(_attend, fullgraph=True, dynamic=False))


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    words: torch.Tensor,
    num_blocks: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One call of FlexAttention; the arguments of `FlexAttention.attend`, and blocks to read."""

    def mask_mod(
        lane: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        return sees(words, lane, row, slot)

    # No list of blocks that every query sees whole: where there is one, the kernel divides the
    # capacity among its thread blocks, and not what is visible.
    blocks = BlockMask.from_kv_blocks(
        num_blocks,
        indices,
        BLOCK_SIZE=(_QUERIES, BLOCK),
        mask_mod=mask_mod,
        seq_lengths=(query.shape[2], keys.shape[2]),
        compute_q_blocks=False,
    )
    # The kernel for one query on a CPU wants such a list; one that partitions do not fit is left.
    options: Any = {"PARTITION_SIZE": BLOCK + 1} if query.device.type == "cpu" else None
    return flex_attention(
        query, keys, values, block_mask=blocks, scale=scale, kernel_options=options
    )


# -- flex choice -----------------------------------------------------------------------------------

# From how many slots on a captured pass has its attention split over the keys: timed.
#
# Few slots are looked through by one call of the usual kernel in less time than it takes to put the
# shares of many thread blocks together; of many slots it leaves most of the device idle. Where the
# limit lies depends on the model and the device. Passes of one lane are timed at load. Of several
# lanes there are many shapes, most of which no text ever has, and each takes seconds to compile: so
# one is tried when it first comes with a length at which one lane would be split. It is timed on
# the pass that is asked for, which writes the same into the same slots however often it runs.
# Owns which passes are timed; captures nothing.

logger = logging.getLogger(__name__)

TIMED_SLOTS = (256, 1024, 4096)  # visible; the last as far as the masked form is captured at load
EVERY_LENGTH = 0  # in place of a number of slots: what is captured serves all of them

Capture = Callable[[torch.Tensor, Spans, int], Callable[[torch.Tensor], torch.Tensor]]
"""(the integers of a pass, its lanes, visible slots or EVERY_LENGTH) -> a pass of such integers"""


class Splits:
    """From how many visible slots on a pass is better split, by its shape."""

    def __init__(
        self,
        make: Callable[[Shape], None],
        capture: Capture,
        lanes: LaneLayout,
        row_counts: Sequence[int],
    ) -> None:
        """Time passes of one lane. Runs passes in the first lane: only before a session.

        make  compiles what a shape needs
        row_counts  for which passes are captured, ascending
        """
        self._make = make
        self._capture = capture
        # A shape that is missing was not tried, is better never split, or cannot be.
        self.least: dict[Shape, int] = {}
        # Of several lanes: the fewest visible slots with which a shape is worth a try again.
        self._again: dict[Shape, float] = {}
        capacity = lanes.num_slots - max(row_counts)
        for num_rows in row_counts:
            shape, spans = (1, num_rows), (Span(lanes.first_slot(0), num_rows),)
            least = self._made(shape, partial(_split_from, capture, spans, capacity))
            if least is not None:
                self.least[shape] = least
            logger.info("attention of %d x %d rows is split from %s slots on", *shape, least)

    def _made(self, shape: Shape, time: Callable[[], int | None]) -> int | None:
        """Compile what a shape needs, and time it; None: splitting does not pay, or cannot be."""
        try:
            self._make(shape)
            return time()
        except ModelError as error:
            logger.info("attention of %d x %d rows keeps its mask: %s", *shape, error)
            self._again[shape] = math.inf
            return None

    def is_split(self, rows: torch.Tensor, spans: Spans, num_visible: int) -> bool:
        """Whether a pass is better split; one of several lanes may be compiled and timed for it.

        rows  the integers of the pass, which may run any number of times
        spans  that are a grid
        """
        shape = len(spans), spans[0].num_rows
        if shape not in self.least and shape[0] > 1:
            worth_it = max(self._again.get(shape, 0), self.least.get((1, shape[1]), math.inf))
            if num_visible >= worth_it:
                self._try(shape, rows, spans, num_visible)
        return num_visible >= self.least.get(shape, math.inf)

    def _try(self, shape: Shape, rows: torch.Tensor, spans: Spans, num_visible: int) -> None:
        def timed() -> int | None:
            return num_visible if _is_better(self._capture, rows, spans, num_visible) else None

        # Where the mask is faster, a text that is twice as long may tell otherwise.
        self._again[shape] = 2 * num_visible
        least = self._made(shape, timed)
        if least is not None:
            self.least[shape] = least
        logger.info("attention of %d x %d rows, tried at %d slots: %s", *shape, num_visible, least)


def _is_better(capture: Capture, rows: torch.Tensor, spans: Spans, num_visible: int) -> bool:
    """Whether a pass with so many visible slots takes less time if its attention is split."""
    split, masked = (capture(rows, spans, length) for length in (EVERY_LENGTH, num_visible))
    forms = {"masked": partial(_run, masked), "split": partial(_run, split)}
    return quickest(forms, rows) == "split"


def _split_from(capture: Capture, spans: Spans, capacity: int) -> int | None:
    """Try the longest text, and then ever longer ones until splitting is the faster way."""

    def is_better(num_visible: int) -> bool:
        return _is_better(capture, _chains(spans, num_visible), spans, num_visible)

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
