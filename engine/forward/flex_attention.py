"""Attention split over the keys by torch's FlexAttention, where our own kernel cannot run.

What is visible is given by numbers on the device: the two words of each row (`masks.as_words`),
and how many blocks of slots they reach. The list of blocks is on the device too, so a program
serves any lanes: each lane begins with a block (`LaneLayout.num_slots` is a multiple of `BLOCK`),
and no block has slots of two lanes. A program serves one number of lanes and rows, and compiling it
takes some seconds.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.errors import ModelError
from engine.forward.forward import Say, Shape, Spans, silent
from engine.forward.masks import MASK_BITS, lowest_slots
from engine.forward.split_attention import SplitAttention, Visible
from engine.layout.attention_windows import FULL, AttentionWindow, LayerKinds
from engine.layout.slots import BLOCK, LaneLayout, Span
from engine.timing import Decide, Form, as_timed, quickest

# -- flex attention --------------------------------------------------------------------------------

SPLIT_DEVICES = ("cuda",)  # on a CPU a program takes 10 s to compile and is slower for short texts
_QUERIES = 128  # with so many queries in a call FlexAttention no longer splits over the keys
_MOST_TILES = 2  # most calls per pass and layer; each reads all keys
_MOST_PROGRAMS = 64
Program = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class FlexVisible(Visible):
    """Which slots the queries of one call see; tensors on their device.

    words       [2 or 3, lanes, n * group] int64: per query, the slot of the whole cache at which
                its prefix ends, and bits for the 64 slots after it. (Slots before the lane would
                count as seen, but no block that is read contains them.) Under an attention window,
                also the lowest slot that it sees
    num_blocks  [lanes, 1, 1] int32: per lane, the number of blocks of slots to read: up to the last
                that any of its queries may see, and under a window from the first
    blocks      [lanes, 1, 1, blocks of the cache] int32: per lane, the indices of these blocks in
                order; torch wants a list of this length, but reads only its beginning
    """

    words: torch.Tensor
    num_blocks: torch.Tensor
    blocks: torch.Tensor


class FlexAttention(SplitAttention):
    """Compiled programs of FlexAttention, one per shape of passes; see `SplitAttention`."""

    name = "FlexAttention"

    def __init__(
        self, num_slots: int, group: int, *, num_lanes: int = 1, kinds: LayerKinds = FULL
    ) -> None:
        super().__init__(num_slots, group, num_lanes=num_lanes, kinds=kinds)
        self._num_blocks = -(-num_slots // BLOCK)  # of a lane
        self._num_in_cache = -(-num_slots * num_lanes // BLOCK)
        self._program: Program | None = None

    def takes(self, num_rows: int) -> bool:
        """True if FlexAttention can split a pass of `num_rows` rows per lane over the keys.

        A pass with too many queries for one call is run in two, for example 17 rows of a model
        with 8 query heads per key head.
        """
        return num_rows <= _MOST_TILES * ((_QUERIES - 1) // self._group)

    def _tiles(self, num_queries: int) -> list[range]:
        """Return ranges of equal size that cover a lane's queries, whole rows each: one per call.

        If they do not divide evenly the last range overlaps the one before, because calls of two
        sizes would need two programs.
        """
        num_rows = num_queries // self._group
        count = -(-num_rows // ((_QUERIES - 1) // self._group))
        size = -(-num_rows // count)
        starts = [min(index * size, num_rows - size) for index in range(count)]
        return [range(start * self._group, (start + size) * self._group) for start in starts]

    def see(self, words: torch.Tensor, first_slots: torch.Tensor) -> FlexVisible:
        """Return which slots the queries see; arguments as in `SplitAttention.see`."""
        num_lanes = len(first_slots)
        shown, bits, *lowest = words.reshape(len(words), num_lanes, -1)
        reached = shown.amax(1) + (MASK_BITS + BLOCK - 1)
        num_blocks = (reached // BLOCK).clamp(max=self._num_blocks).to(torch.int32)
        start = first_slots // BLOCK
        parts = [shown + first_slots[:, None], bits]
        if lowest:
            skipped = lowest[0].amin(1) // BLOCK
            num_blocks = num_blocks - skipped.to(torch.int32)
            start = start + skipped
            parts.append(lowest[0] + first_slots[:, None])
        in_cache = torch.stack(parts)
        queries = in_cache.repeat_interleave(self._group, dim=2) if self._group > 1 else in_cache
        order = torch.arange(self._num_in_cache, dtype=torch.int32, device=words.device)
        blocks = start.to(torch.int32)[:, None] + order
        blocks = blocks.clamp(max=self._num_in_cache - 1)
        return FlexVisible(queries, num_blocks.view(num_lanes, 1, 1), blocks[:, None, None])

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: Visible,
        scale: float,
    ) -> torch.Tensor:
        """Run attention split over the keys; arguments and result as in `SplitAttention.attend`."""
        assert isinstance(visible, FlexVisible)
        assert self._program is not None, "no program was made"
        words, shown = visible.words, (visible.num_blocks, visible.blocks)
        tiles = self._tiles(query.shape[2])
        if len(tiles) == 1:
            # The queries of several lanes with one row each are not contiguous: the compiler would
            # take them for another shape, and compile again at the first run.
            return self._program(query.contiguous(), keys, values, words, *shown, scale)
        parts, end = [], 0
        for tile in tiles:
            of_tile = (query[:, :, tile.start : tile.stop], words[:, :, tile.start : tile.stop])
            part, seen = (one.contiguous() for one in of_tile)
            out = self._program(part, keys, values, seen, *shown, scale)
            parts.append(out[:, :, end - tile.start :])
            end = tile.stop
        return torch.cat(parts, dim=2)

    def make(self, shape: Shape, keys: torch.Tensor, values: torch.Tensor, scale: float) -> None:
        """Compile and check the program for passes of `shape`; see `SplitAttention.make`."""
        assert len(self.made) < _MOST_PROGRAMS
        assert self._num_slots % BLOCK == 0 or keys.shape[2] == self._num_slots
        self._program = self._program or _compiled()
        super().make(shape, keys, values, scale)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Surround what may compile a program."""
        # Imported here, because the import takes seconds.
        import torch._dynamo
        import torch._inductor.config

        with (
            torch._dynamo.config.patch(recompile_limit=_MOST_PROGRAMS),
            # Compile in this process: worker processes would outlive the compilation.
            torch._inductor.config.patch(compile_threads=1),
        ):
            yield


def sees(
    words: torch.Tensor, lane: torch.Tensor, query: torch.Tensor, slot: torch.Tensor
) -> torch.Tensor:
    """Return True where a query sees a slot: the mask of `masks.from_words`, element by element.

    words  [2 or 3, lanes, queries] int64
    lane, query, slot  integer tensors: which elements
    """
    behind = slot - words[0, lane, query]
    bit = words[1, lane, query] >> behind.clamp(0, MASK_BITS - 1) & 1
    is_seen = (behind < 0) | (behind < MASK_BITS) & (bit == 1)
    return is_seen & (slot >= words[2, lane, query]) if len(words) > 2 else is_seen


def _compiled() -> Program:
    """Return `_attend` wrapped by torch.compile."""
    return cast(Program, torch.compile(_attend, fullgraph=True, dynamic=False))


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    words: torch.Tensor,
    num_blocks: torch.Tensor,
    blocks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Make one call of FlexAttention; arguments as in `SplitAttention.attend` and `FlexVisible`."""

    def mask_mod(
        lane: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        return sees(words, lane, row, slot)

    # No list of blocks that every query sees completely is given: with one, the kernel would divide
    # the whole capacity among its thread blocks instead of the visible slots.
    block_mask = BlockMask.from_kv_blocks(
        num_blocks,
        blocks,
        BLOCK_SIZE=(_QUERIES, BLOCK),
        mask_mod=mask_mod,
        seq_lengths=(query.shape[2], keys.shape[2]),
        compute_q_blocks=False,
    )
    # The CPU's kernel for one query needs such a list; this option makes torch use another kernel.
    options: Any = {"PARTITION_SIZE": BLOCK + 1} if query.device.type == "cpu" else None
    return flex_attention(
        query, keys, values, block_mask=block_mask, scale=scale, kernel_options=options
    )


# -- flex choice -----------------------------------------------------------------------------------

# Choose, by timing, from how many visible slots on a recorded pass splits its attention.
#
# Over few slots the usual kernel takes less time than joining the results of many thread blocks;
# over many slots it leaves most of the device idle. The limit depends on the model and the device.
# Owns which passes are timed; records nothing itself.

logger = logging.getLogger(__name__)

TIMED_SLOTS = (256, 512, 1024, 4096)  # numbers of visible slots for which both forms are timed
_LONG_S = 1.0  # a program that took so long was compiled, not found from an earlier start
EVERY_LENGTH = 0  # in place of a number of slots: the recording serves all lengths

Capture = Callable[[Shape, torch.Tensor, int], Callable[[torch.Tensor], torch.Tensor]]
"""Function: (shape of a pass, its integers, visible slots or EVERY_LENGTH) -> recorded pass"""


def find_splits(
    make: Callable[[Shape], None],
    capture: Capture,
    lanes: LaneLayout,
    shapes: Iterable[Shape],
    capacity: int,
    say: Say = silent,
    decide: Decide = as_timed,
    windows: Sequence[AttentionWindow] = (),
) -> dict[Shape, int]:
    """Return, per shape, the number of visible slots from which on split attention is faster.

    Shapes for which it never is, or which cannot be split, are left out; the log says why. Runs
    passes in all lanes, so call it before any text is opened.

    make      compiles the program for a shape; raises ModelError if it cannot
    capture   records a pass
    shapes    shapes of the passes that are recorded
    capacity  most slots of a lane that a text may use
    say       is called with a short text for each program that took long to compile
    decide    chooses the form from the timed ones
    windows   the model's attention windows
    """
    found: dict[Shape, int] = {}
    shapes = tuple(shapes)
    for number, shape in enumerate(shapes, 1):
        spans = tuple(Span(lanes.first_slot(lane), shape[1]) for lane in range(shape[0]))
        started = time.monotonic()
        try:
            make(shape)
            if time.monotonic() - started > _LONG_S:
                say(f"compiling attention: {number} of {len(shapes)}")
            rows = partial(chains, spans, windows=windows)
            least = _split_from(partial(capture, shape), rows, capacity, decide)
        except ModelError as error:
            logger.info("attention of %d x %d rows keeps its mask: %s", *shape, error)
            continue
        if least is not None:
            found[shape] = least
        logger.info("attention of %d x %d rows is split from %s slots on", *shape, least)
    return found


def _split_from(
    capture: Callable[[torch.Tensor, int], Callable[[torch.Tensor], torch.Tensor]],
    rows_over: Callable[[int], torch.Tensor],
    capacity: int,
    decide: Decide,
) -> int | None:
    """Return the number of visible slots from which on splitting is faster; None: never.

    Times the longest text first, then increasing lengths until splitting is faster.
    """
    split = capture(rows_over(capacity), EVERY_LENGTH)

    def is_better(num_visible: int) -> bool:
        rows = rows_over(num_visible)
        masked = capture(rows, num_visible)
        forms = [
            Form(name, name, partial(run_to_end, captured, rows))
            for name, captured in (("masked", masked), ("split", split))
        ]
        # Any order: torch's products, which GPUs multiply with, have many anyway.
        return quickest(forms, decide, any_order=True) == "split"

    if not is_better(capacity):
        return None
    shorter = [num_slots for num_slots in TIMED_SLOTS if num_slots < capacity]
    for number, num_slots in enumerate(shorter):
        if is_better(num_slots):
            return num_slots if number else EVERY_LENGTH
    return shorter[-1] + 1 if shorter else EVERY_LENGTH


def run_to_end(captured: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> float:
    """Run a recorded pass and wait for it, by fetching one number; return that number."""
    return float(captured(rows)[0, 0])


def chains(spans: Spans, num_visible: int, windows: Sequence[AttentionWindow] = ()) -> torch.Tensor:
    """Return the rows of a pass: in each lane a chain at the end of `num_visible` slots.

    [5 + 2 len(windows), n] int64, as in `Backend.forward`.
    """
    count = spans[0].num_rows
    step = torch.arange(count).repeat(len(spans))
    first = torch.tensor([span.first_slot for span in spans]).repeat_interleave(count)
    prefix = torch.full_like(step, num_visible - count)
    nothing = torch.zeros_like(step)
    bits = (2 << step) - 1
    of_windows = [part for one in windows for part in (lowest_slots(prefix, one), bits)]
    return torch.stack((nothing, nothing, first + prefix + step, prefix, bits, *of_windows))
