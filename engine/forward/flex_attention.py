"""Attention split over the keys, for GPUs: torch's FlexAttention with the mask of a tree.

One call of the usual kernel has a thread block per lane and key head, however long the text is.
This one has as many as the device takes, each with a share of the keys that are visible. What is
visible are numbers on the device, the two words of each row (`masks.as_words`) and how many blocks
of slots they reach: so a program of so many rows serves every length, and what it takes goes by
what the rows see and not by what the cache could hold. Which blocks these are is a list on the
device as well, so it serves any lanes: all lanes are one long run of slots, in which a lane begins
with a block (`LaneLayout.num_slots` is a multiple of `BLOCK`), and no block has slots of two.

Each program is compiled at load and held to the masked form on random keys before it is used. Owns
the programs; knows no layer and no model.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.checkpoint.files import one_line
from engine.errors import ModelError
from engine.forward.forward import Say, Shape, Spans, silent
from engine.forward.masks import MASK_BITS, from_words
from engine.forward.operators import Decide, as_timed, quickest, side_by_side
from engine.layout.slots import LaneLayout, Span

# -- flex attention --------------------------------------------------------------------------------

BLOCK = 128  # slots that are skipped or read together
SPLIT_DEVICES = ("cuda",)  # on a CPU a program takes 10 s to compile and is slower for short texts
_QUERIES = 128  # of one call: from there on FlexAttention does not split over the keys
_MOST_TILES = 2  # calls of a pass; each reads all keys
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


@dataclass(frozen=True, slots=True)
class Visible:
    """What the queries of one call see; on their device.

    words       [2, lanes, n * group] int64: of each query where its prefix ends, counted from the
                start of the cache, and 64 slots behind it. What lies before the lane is in no block
                that is read
    num_blocks  [lanes, 1, 1] int32: of slots, up to the last that any query of a lane may see
    blocks      [lanes, 1, 1, blocks of the cache] int32: which they are, in their order. As long as
                torch wants such a list; only its beginning is read
    """

    words: torch.Tensor
    num_blocks: torch.Tensor
    blocks: torch.Tensor


class FlexAttention:
    """The programs for lanes of `num_slots` slots, where `group` query heads share a key head."""

    def __init__(self, num_slots: int, group: int, *, num_lanes: int = 1) -> None:
        self._num_slots = num_slots
        self._num_blocks = -(-num_slots // BLOCK)  # of a lane
        self._num_in_cache = -(-num_slots * num_lanes // BLOCK)
        self._group = group
        self._program: Program | None = None
        self.made: set[Shape] = set()

    def takes(self, num_rows: int) -> bool:
        """Whether FlexAttention splits a pass of so many rows a lane over the keys.

        In two calls where one has too many queries: 17 rows of a model with 8 query heads to a key
        head, for one.
        """
        return num_rows <= _MOST_TILES * ((_QUERIES - 1) // self._group)

    def _tiles(self, num_queries: int) -> list[range]:
        """Divide the queries of a lane into calls of as many, whole rows each.

        The last one begins before the end of the one before if they do not divide: calls of two
        sizes would be two programs.
        """
        num_rows = num_queries // self._group
        count = -(-num_rows // ((_QUERIES - 1) // self._group))
        size = -(-num_rows // count)
        starts = [min(index * size, num_rows - size) for index in range(count)]
        return [range(start * self._group, (start + size) * self._group) for start in starts]

    def see(self, words: torch.Tensor, first_slots: torch.Tensor) -> Visible:
        """Return what `words` [2, lanes * n], as `masks.as_words` says, let the queries see.

        first_slots  [lanes] int64: where the lanes begin
        """
        num_lanes = len(first_slots)
        by_lane = words.reshape(2, num_lanes, -1)
        reached = by_lane[0].amax(1) + (MASK_BITS + BLOCK - 1)
        num_blocks = (reached // BLOCK).clamp(max=self._num_blocks).to(torch.int32)
        in_cache = torch.stack((by_lane[0] + first_slots[:, None], by_lane[1]))
        queries = in_cache.repeat_interleave(self._group, dim=2) if self._group > 1 else in_cache
        order = torch.arange(self._num_in_cache, dtype=torch.int32, device=words.device)
        blocks = (first_slots // BLOCK).to(torch.int32)[:, None] + order
        blocks = blocks.clamp(max=self._num_in_cache - 1)
        return Visible(queries, num_blocks.view(num_lanes, 1, 1), blocks[:, None, None])

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
        keys, values  [1, kv_heads, slots of all lanes, dim]
        """
        assert self._program is not None, "no program was made"
        words, shown = visible.words, (visible.num_blocks, visible.blocks)
        tiles = self._tiles(query.shape[2])
        if len(tiles) == 1:
            # Of several lanes with a row each the queries lie apart: the compiler would take them
            # for another shape, and make the program once more when it first runs.
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
        """Compile the program for passes of `shape`, and hold it to the masked form.

        keys, values  [1, kv_heads, slots of all lanes, dim]: any numbers; none are changed

        Raises:
            ModelError: it cannot be compiled here, or computes something else.
        """
        # It takes seconds to import, which only whoever compiles has to pay.
        import torch._dynamo
        import torch._inductor.config

        assert len(self.made) < _MOST_PROGRAMS
        assert self._num_slots % BLOCK == 0 or keys.shape[2] == self._num_slots
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
        """The largest difference from the masked form, relative to the largest output.

        In the last lanes, the last of all first: a lane is taken for no other one.
        """
        num_lanes, num_rows = shape
        worst = 0.0
        size = num_lanes, keys.shape[1], num_rows * self._group, keys.shape[3]
        random = torch.Generator().manual_seed(num_rows)
        query = torch.randn(size, generator=random).to(keys)
        lanes = torch.arange(keys.shape[2] // self._num_slots, device=keys.device).flip(0)
        lanes = lanes[:num_lanes]
        k, v = (
            part[0].view(keys.shape[1], -1, self._num_slots, keys.shape[3]).transpose(0, 1)[lanes]
            for part in (keys, values)
        )
        for share in (0.0, 0.5, 1.0):  # of the cache that the prefix fills
            words = self._random_words(shape, share, random).to(keys.device)
            visible = self.see(words, lanes * self._num_slots)
            got = self.attend(query, keys, values, visible, scale)
            mask = from_words(words, self._num_slots, keys.dtype).view(num_lanes, 1, num_rows, -1)
            mask = mask.repeat_interleave(self._group, dim=2)
            want = side_by_side(query, k, v, mask, scale)
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
    blocks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One call of FlexAttention; the arguments of `FlexAttention.attend`, and of `Visible`."""

    def mask_mod(
        lane: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        return sees(words, lane, row, slot)

    # No list of blocks that every query sees whole: where there is one, the kernel divides the
    # capacity among its thread blocks, and not what is visible.
    block_mask = BlockMask.from_kv_blocks(
        num_blocks,
        blocks,
        BLOCK_SIZE=(_QUERIES, BLOCK),
        mask_mod=mask_mod,
        seq_lengths=(query.shape[2], keys.shape[2]),
        compute_q_blocks=False,
    )
    # The kernel for one query on a CPU wants such a list; one that partitions do not fit is left.
    options: Any = {"PARTITION_SIZE": BLOCK + 1} if query.device.type == "cpu" else None
    return flex_attention(
        query, keys, values, block_mask=block_mask, scale=scale, kernel_options=options
    )


# -- flex choice -----------------------------------------------------------------------------------

# From how many slots on a captured pass has its attention split over the keys: timed at load.
#
# Few slots are looked through by one call of the usual kernel in less time than it takes to put the
# shares of many thread blocks together; of many slots it leaves most of the device idle. Where the
# limit lies depends on the model and the device. Owns which passes are timed; captures nothing.

logger = logging.getLogger(__name__)

TIMED_SLOTS = (256, 1024, 4096)  # visible
_LONG_S = 1.0  # of a program: it was not found where an earlier start has left it
EVERY_LENGTH = 0  # in place of a number of slots: what is captured serves all of them

Capture = Callable[[Shape, torch.Tensor, int], Callable[[torch.Tensor], torch.Tensor]]
"""(the shape of a pass, its integers, visible slots or EVERY_LENGTH) -> a pass of such integers"""


def find_splits(
    make: Callable[[Shape], None],
    capture: Capture,
    lanes: LaneLayout,
    shapes: Iterable[Shape],
    capacity: int,
    say: Say = silent,
    decide: Decide = as_timed,
) -> dict[Shape, int]:
    """Return from how many visible slots on a pass is better split, by its shape.

    make      compiles what a shape needs
    shapes    of the passes that are captured
    capacity  slots of a lane that a text may have
    say       is told of each program that took long which of how many it was

    What is missing is better never split, or cannot be: the log says why. Runs passes in all lanes:
    only before a session.
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
            least = _split_from(partial(capture, shape), spans, capacity, decide)
        except ModelError as error:
            logger.info("attention of %d x %d rows keeps its mask: %s", *shape, error)
            continue
        if least is not None:
            found[shape] = least
        logger.info("attention of %d x %d rows is split from %s slots on", *shape, least)
    return found


def _split_from(
    capture: Callable[[torch.Tensor, int], Callable[[torch.Tensor], torch.Tensor]],
    spans: Spans,
    capacity: int,
    decide: Decide,
) -> int | None:
    """Try the longest text, and then ever longer ones until splitting is the faster way."""
    split = capture(chains(spans, capacity), EVERY_LENGTH)

    def is_better(num_visible: int) -> bool:
        rows = chains(spans, num_visible)
        masked = capture(rows, num_visible)
        forms = {"masked": partial(run_to_end, masked), "split": partial(run_to_end, split)}
        return decide(quickest(forms, rows), tuple(forms)) == "split"

    if not is_better(capacity):
        return None
    shorter = [num_slots for num_slots in TIMED_SLOTS if num_slots < capacity]
    for number, num_slots in enumerate(shorter):
        if is_better(num_slots):
            return num_slots if number else EVERY_LENGTH
    return shorter[-1] + 1 if shorter else EVERY_LENGTH


def run_to_end(captured: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> float:
    """Run a pass until one of its numbers is on the host."""
    return float(captured(rows)[0, 0])


def chains(spans: Spans, num_visible: int) -> torch.Tensor:
    """A chain at the end of `num_visible` slots of each lane, as in `Backend.forward`."""
    count = spans[0].num_rows
    step = torch.arange(count).repeat(len(spans))
    first = torch.tensor([span.first_slot for span in spans]).repeat_interleave(count)
    prefix = torch.full_like(step, num_visible - count)
    nothing = torch.zeros_like(step)
    return torch.stack((nothing, nothing, first + prefix + step, prefix, (2 << step) - 1))
