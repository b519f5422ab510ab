"""Run the forward passes of a loaded model: `ModelExecutor`.

A `SlotMap` decides which rows a pass has, and a `ModelExecutor` runs the pass on one model with one
cache. Owns padding and rounding (which shapes reach the model) and the conversion of integers to
tensors. Knows no tree and no message. Two modes:

    normal        a pass has the rows it was given, padded if the backend has programs or graphs for
                  certain numbers of rows only; the number of visible slots is rounded up, to a
                  multiple of 64 or more
    reproducible  `fixed_rows` = R: every pass but a prefill has R rows per lane; padding rows write
                  to scratch slots behind the cache, and `set_total` fixes the number of visible
                  slots, so that a row's last bits do not depend on the other rows of the pass
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice, product
from typing import Any

import numpy as np
import torch

from engine.checkpoint.model import LoadedModel
from engine.choice.coupling_on_gpu import Choice, choice_inputs, record_choices, try_choices
from engine.choice.first_uses import use_once
from engine.choice.sampling import Sampling
from engine.device import pin_ahead, send
from engine.executor import Executor
from engine.forward.backends import make_backend
from engine.forward.forward import (
    FEWEST_LARGE_ROWS,
    Backend,
    Layers,
    ModelPass,
    Output,
    Say,
    are_consecutive,
    check_layers,
    filled,
    filled_up,
    joined,
    rows_of,
    silent,
)
from engine.forward.graphs import captured_len
from engine.forward.masks import MASK_BITS
from engine.layout.slots import BLOCK, Feed, LaneLayout, Move, Span, copied, in_steps, lane_counts
from engine.room import FEWEST_PROMPT_ROWS, PROMPT_ROWS, scored_rows


class ModelExecutor(Executor):
    """Runs passes of a loaded model, with a cache of one lane of `capacity` slots per text."""

    def __init__(
        self,
        loaded: LoadedModel,
        capacity: int,
        *,
        num_lanes: int = 1,
        fixed_rows: int | None = None,
        backend: str = "reference",
        row_counts: Sequence[int] = (),
        layers: Layers = (),
    ) -> None:
        """Allocate the cache and make the backend.

        capacity    slots of each lane
        num_lanes   number of lanes (texts at once)
        fixed_rows  rows per lane of every pass in reproducible mode; None: normal mode
        backend     as for `make_backend` (`loading.make_executor` chooses)
        row_counts  numbers of rows for which the backend makes programs or graphs, ascending; not
                    used with `fixed_rows`
        layers      layers whose hidden states will be asked for (`forward.py`): programs and graphs
                    return them too

        Raises:
            ModelError: the cache does not fit into memory, the model cannot run a token or has no
                such layers, or the backend cannot run it.
        """
        assert capacity > 0
        assert fixed_rows is None or 0 < fixed_rows <= MASK_BITS
        check_layers(loaded.name, loaded.num_layers, layers)
        self.loaded = loaded
        self.layers = layers
        self.capacity = capacity
        self.fixed_rows = fixed_rows
        row_counts = (fixed_rows,) if fixed_rows else tuple(row_counts)
        # On a GPU every new number of rows makes torch choose kernels and allocate memory anew.
        self.pads_prompts = loaded.device.type == "cuda"
        # On a GPU attention copies a mask whose width is no multiple of 8, in every layer.
        is_on_gpu = self.pads_prompts or backend == "graphs"
        self._most_visible = in_steps(capacity) if is_on_gpu else capacity
        num_slots = self._most_visible + max(row_counts, default=int(self.pads_prompts))
        if backend == "graphs":  # its attention reads blocks of slots, each within one lane
            num_slots = -(-num_slots // BLOCK) * BLOCK
        self.lanes = LaneLayout(num_lanes, num_slots)
        self.windows = loaded.kinds.within(num_slots).windows
        self.num_lanes_per_pass = num_lanes  # `check_reproducible` may set it to 1
        self._num_too_large = 0  # number of decode passes with more rows than any graph has
        self._total: int | None = None  # visible slots of every pass; None: as the pass needs
        self._backend: Backend | None = make_backend(
            backend, loaded, self.lanes, row_counts, layers
        )

    @property
    def backend(self) -> str:
        """Return the name of the backend that runs the forward."""
        assert self._backend is not None, "this executor was freed"
        return self._backend.name

    @property
    def forms(self) -> str:
        """Return in words what computes the passes, for people."""
        assert self._backend is not None, "this executor was freed"
        return self._backend.forms

    @property
    def is_by_row(self) -> bool:
        """True if the forms are made so that a row does not depend on the rest of its pass."""
        return self.fixed_rows is None and self._backend is not None and self._backend.is_by_row

    @property
    def row_counts(self) -> Sequence[int]:
        """Return the numbers of rows for which the backend has programs or graphs, ascending."""
        assert self._backend is not None, "this executor was freed"
        return self._backend.row_counts

    @property
    def num_uncaptured(self) -> int:
        """Return how many decode passes had no recording (CUDA graph) and ran kernel by kernel."""
        return self._num_too_large + (self._backend.num_uncaptured if self._backend else 0)

    @property
    def num_late(self) -> int:
        """Return how many recordings (CUDA graphs) were made after load, while texts waited."""
        return 0 if self._backend is None else self._backend.num_late

    def take_over(self, say: Say = silent) -> None:
        """Let the backend repack the weights; the loaded model's own forward may not run again.

        say  is called with a short text for each step that takes long
        """
        assert self._backend is not None, "this executor was freed"
        self._backend.take_over(timed=self.fixed_rows is None, say=say)

    def set_total(self, total: int | None) -> None:
        """Let every pass cover `total` slots from now on; None: as needed. See `Executor`.

        Reproducible mode needs a number before any pass runs.
        """
        assert total is None or 0 < total <= self.capacity
        self._total = None if total is None else self._round_up(total)

    def lay_out(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> ModelPass:
        """Return a pass as tensors of integers, padded; a prefill chunk must be the only lane."""
        assert 0 < len(feeds) <= self.num_lanes_per_pass
        assert len(feeds) == 1 or all(feed.masks is not None for feed in feeds)
        num_visible = max(map(self._num_visible, feeds))
        self._num_too_large += self._exceeds_recordings(feeds)
        if len(feeds) == 1 and (self.fixed_rows is None or self.num_lanes_per_pass == 1):
            return self._lay_out_one(feeds[0], asks[0], num_visible)
        by_lane = {feed.lane: self._rows_of(feed) for feed in feeds}
        assert len(by_lane) == len(feeds), "two feeds of one lane"
        count = None if feeds[0].masks is None else self._count_for(by_lane.values())
        if count is not None:
            for lane in self._lanes_for(by_lane):
                filling = count, self._scratch(lane), len(self.windows)
                by_lane[lane] = filled(by_lane.get(lane), *filling)
        else:
            by_lane = self._filled_up(by_lane, is_prompt=feeds[0].masks is None)
        rows, spans, starts = joined(by_lane, self.lanes)
        pairs = zip(feeds, asks, strict=True)
        index = [starts[feed.lane] + row for feed, ask in pairs for row in ask]
        fed = tuple(slice(starts[f.lane], starts[f.lane] + len(f.tokens)) for f in feeds)
        keep, made = torch.tensor(index, dtype=torch.int64), torch.from_numpy(rows)
        is_padded = count is not None or self._has_all_logits(feeds[0], rows.shape[1])
        return ModelPass(made, spans, num_visible, len(index), keep, is_padded=is_padded, fed=fed)

    def _lay_out_one(self, feed: Feed, ask: Sequence[int], num_visible: int) -> ModelPass:
        """Return a pass of one lane: the usual case, for which host time matters most."""
        rows = self._rows_of(feed)
        count = None if feed.masks is None else self._count_for((rows,))
        if count is not None:
            rows = filled(rows, count, self._scratch(feed.lane))
        else:
            rows = self._filled_up({feed.lane: rows}, is_prompt=feed.masks is None)[feed.lane]
        is_padded = count is not None or self._has_all_logits(feed, rows.shape[1])
        spans = (Span(self.lanes.first_slot(feed.lane), rows.shape[1]),)
        # If the wanted logits are consecutive, they are a slice of all logits: nothing is copied.
        are_there = (is_padded or len(ask) == rows.shape[1]) and are_consecutive(ask)
        keep = None if are_there else torch.tensor(ask, dtype=torch.int64)
        made, fed = torch.from_numpy(rows), (slice(len(feed.tokens)),)
        return ModelPass(
            *(made, spans, num_visible, len(ask), keep),
            is_padded=is_padded,
            fed=fed,
            start=ask[0] if are_there and ask else 0,
        )

    def _filled_up(self, by_lane: dict[int, Any], *, is_prompt: bool) -> dict[int, Any]:
        """Return the rows of a pass that has no recording, on a GPU padded to a power of two.

        Else each new number of rows might make the GPU load kernels in the middle of a text.
        """
        if not (self.pads_prompts if is_prompt else self._pads_large):
            return by_lane
        fewest = FEWEST_PROMPT_ROWS if is_prompt else FEWEST_LARGE_ROWS
        return filled_up(by_lane, fewest, self._scratch(max(by_lane)))

    @property
    def _pads_large(self) -> bool:
        """True if decode passes with more rows than any recording are padded, to a power of two."""
        return self.is_captured and self.fixed_rows is None and bool(self.row_counts)

    def _has_all_logits(self, feed: Feed, num_rows: int) -> bool:
        """True if all logits of a pass are computed, padding's too: a number that was warmed up."""
        is_short = num_rows <= scored_rows(self.loaded.vocab_size)
        return is_short and feed.masks is not None and self._pads_large

    def _rows_of(self, feed: Feed) -> Any:
        """Return the rows of one lane as integers, int64, as in `Backend.forward`."""
        assert max(feed.positions) < self.loaded.max_model_len, "beyond the model's positions"
        return rows_of(feed, self.lanes.first_slot(feed.lane), self.windows)

    def forward(self, step: ModelPass, layers: Layers = ()) -> Output:
        """Run a laid-out pass on the device; return logits and features (`Executor.forward`).

        layers  if they are not those named at load, passes that are programs or graphs run slower

        The features are in the model's dtype, of all rows, also of those that were not asked for.

        Raises:
            ModelError: the model has no such layers.
        """
        assert self._backend is not None, "this executor was freed"
        if layers != self.layers:
            check_layers(self.loaded.name, self.loaded.num_layers, layers)
        keep, num_asked = step.keep, step.num_asked
        out = self._backend.forward(
            step.rows,
            step.spans,
            num_visible=step.num_visible,
            keep=None if step.is_padded else keep,
            layers=layers,
        )
        logits, features = out.logits, out.features
        if features is None and not step.is_padded and logits.dtype == torch.float32:
            return out
        if features is not None:
            parts = [features[rows] for rows in step.fed]
            features = parts[0] if len(parts) == 1 else torch.cat(parts)
        if step.is_padded:
            asked = slice(step.start, step.start + num_asked)
            logits = logits[asked if keep is None else send(keep, logits.device)]
        return Output(logits.float(), features)

    def run_together(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run several lanes' rows as one pass; return the logits of each, concatenated."""
        logits = self.forward(self.lay_out(feeds, asks)).logits
        return logits.clone() if self.is_captured else logits  # the next pass overwrites them

    def can_chain(self, feeds: Sequence[Feed], choice: Choice) -> bool:
        """True if `run_chain` may be called: there is a recording of these steps and `choice`."""
        if not self.is_captured or self.fixed_rows is not None:
            return False
        assert self._backend is not None
        num_visible = max(map(self._num_visible, feeds))
        return self._backend.has_chain(len(feeds), num_visible=num_visible, choice=choice)

    def run_chain(
        self, feeds: Sequence[Feed], choice: Choice, inputs: torch.Tensor
    ) -> torch.Tensor:
        """Run n draft steps of one row, each with the token chosen before; needs `can_chain`."""
        assert self._backend is not None, "this executor was freed"
        rows = np.concatenate([self._rows_of(feed) for feed in feeds], axis=1)
        steps = torch.zeros(len(rows) + 1, len(inputs), dtype=torch.int64)
        steps[:-1, : len(feeds)] = torch.from_numpy(rows)
        steps[-1] = inputs
        num_visible = max(map(self._num_visible, feeds))
        return self._backend.chain(steps, num_visible=num_visible, choice=choice)

    def move(self, *moves: Move) -> None:
        """Copy cache slots of all lanes in one gather (see `Executor.move`)."""
        assert self._backend is not None, "this executor was freed"
        self._backend.move(*copied(moves, self.lanes))

    def copy_prefix(self, source_lane: int, target_lane: int, length: int) -> None:
        """Copy the first `length` slots of one lane to another lane."""
        assert self._backend is not None, "this executor was freed"
        assert source_lane != target_lane
        assert 0 < length <= self.capacity
        first_slot = self.lanes.first_slot
        self._backend.copy(first_slot(source_lane), first_slot(target_lane), length)

    def wipe(self, lane: int, start: int) -> None:
        """Write zeros to all slots of a lane from `start` on, its scratch included."""
        assert self._backend is not None, "this executor was freed"
        assert 0 <= start <= self.capacity
        first = self.lanes.first_slot(lane) + start
        self._backend.wipe(first, self.lanes.num_slots - start)

    def not_finite(self, lane: int) -> int | None:
        """Return the slot of a lane in which NaN or infinity first occurred; None: in no slot."""
        assert self._backend is not None, "this executor was freed"
        found = self._backend.not_finite(self.lanes.first_slot(lane), self.capacity)
        return None if found is None else found % self.capacity

    def warm_up(
        self,
        row_counts: Iterable[int],
        *,
        choices: Sequence[Choice] = (),
        beside: Sequence[Choice] = (),
        rare: Sequence[Choice] = (),
        chains: Sequence[int] = (),
        chained: Sequence[Choice] = (),
        say: Callable[[str], None] = lambda _: None,
    ) -> dict[int, float]:
        """Run passes of each number of rows, so that no text waits; return rows -> seconds.

        A backend of CUDA graphs records passes of each shape at each length, so that none is
        recorded after load, and the choices and chains below; they are for it alone.

        row_counts  numbers of rows, ascending
        choices  choices to record over the logits of passes
        beside   choices to record over logits that others (heads) compute on this device
        rare     choices that are run once and not recorded
        chains   numbers of steps for which chains are recorded, with each choice of `chained`
        say      is called with how many of how many recordings are made

        Returns number of rows -> seconds of a pass, over few slots. Overwrites the first slots, so
        call it before any text is opened.
        """
        seconds: dict[int, float] = {}
        total, row_counts = self._total, tuple(row_counts)
        totals, lanes = [total or self._round_up(1)], self._lanes_of_passes()
        if self.is_captured:
            row_counts = tuple(self.row_counts)
            while total is None and totals[-1] < self._most_visible:
                totals.append(self._round_up(totals[-1] + 1))
        # The largest shape first, so that all others reuse its memory.
        shapes = list(product(reversed(totals), reversed(lanes), reversed(row_counts)))
        for number, (self._total, num_lanes, num_rows) in enumerate(shapes):
            if self.is_captured:
                say(f"recording passes: {number} of {len(shapes)}")
            self._warm_up(num_lanes, num_rows)
        if self.is_captured and self.fixed_rows is None:
            say("recording chains and choices")
            for self._total in reversed(totals):
                self._warm_up_chains(chains, chained)
        self._total = totals[0]
        for num_rows in row_counts:
            seconds[num_rows] = self.seconds_of(Feed.chain(0, num_rows, self.loaded.vocab_size))
        if self.is_captured and row_counts:
            logits = self._warm_up_choices(choices)
            record_choices((*choices, *beside), logits.clone(), self.row_counts)
            try_choices((*rare, *beside), logits)
        self._total = total
        self._warm_up_large(lanes)
        self.warm_up_prompts()
        if self._backend is not None:
            # Token 0, of these passes, may give NaN in some models: clear what it has written.
            for lane in range(max(lanes)):
                self.wipe(lane, 0)
            if self.pads_prompts:
                self._use_once()
            self._backend.is_loading = False
        return seconds

    def _use_once(self) -> None:
        """Run on a GPU what few texts ask for, so that none waits until kernels are loaded."""
        use_once(max(self.row_counts, default=1), self.loaded.vocab_size, self.loaded.device)
        self.not_finite(0)
        if self.lanes.count > 1:
            self.copy_prefix(0, 1, 1)

    def _lanes_of_passes(self) -> Sequence[int]:
        """Return the numbers of lanes for which passes are run at load."""
        if self.fixed_rows is not None or not self.is_captured:
            return (1,)
        return lane_counts(self.num_lanes_per_pass)

    def _warm_up(self, num_lanes: int, num_rows: int) -> None:
        """Run a pass of so many lanes and rows per lane, without and with hidden states."""
        feeds = [Feed.chain(n, num_rows, self.loaded.vocab_size) for n in range(num_lanes)]
        for layers in {(), self.layers}:
            self.forward(self.lay_out(feeds, [range(num_rows)] * num_lanes), layers)

    def _warm_up_large(self, lane_counts: Sequence[int]) -> None:
        """Run decode passes of more rows than any recording has, of the padded numbers of rows."""
        if not self._pads_large:
            return
        counted, total = self._num_too_large, self._total
        for num_lanes, num_rows in product(reversed(lane_counts), (MASK_BITS, FEWEST_LARGE_ROWS)):
            if self.row_counts[-1] < num_rows <= min(self.capacity, self.loaded.max_model_len):
                self._total = total or self._round_up(num_rows)
                self._warm_up(num_lanes, num_rows)
        self._num_too_large, self._total = counted, total

    def _warm_up_choices(self, choices: Iterable[Choice]) -> torch.Tensor:
        """Record choices over the logits of recorded passes, read in place; return these logits.

        The caller also records them over a copy: logits of prompts and of several lanes, and those
        that biases and penalties have changed, are copied before a choice reads them.
        """
        count = max(self.row_counts)
        logits = self.forward(self.lay_out((Feed.chain(0, count),), (range(count),))).logits
        record_choices(choices, logits, self.row_counts)
        return logits

    def warm_up_prompts(self) -> None:
        """Run prefill chunks of all padded numbers of rows, so that no text waits for the first.

        A GPU loads a kernel at its first call and allocates memory at its first use. This runs
        last, because recording gives cached memory back; the longest chunk first, so that all
        others reuse its memory.
        """
        if not self.pads_prompts:
            return
        total, longest = self._total, min(self.capacity, self.loaded.max_model_len)
        self._total = total or self._round_up(longest)
        most, counts = min(PROMPT_ROWS, longest), [FEWEST_PROMPT_ROWS]
        while counts[-1] < most:  # chunks of fewer rows are padded to these
            counts.append(2 * counts[-1])
        for num_rows in reversed(counts):
            where = tuple(range(min(num_rows, most)))
            feed = Feed((0,) * len(where), where, where, 0, None)
            for layers in {(), self.layers}:
                out = self.forward(self.lay_out((feed,), ((len(where) - 1,),)), layers)
                if out.features is not None and num_rows == counts[-1]:
                    pin_ahead(out.features.nbytes, out.features)
        self._total = total
        self.wipe(0, 0)

    def _warm_up_chains(self, chains: Iterable[int], choices: Sequence[Choice]) -> None:
        """Record chains of each number of steps with each choice."""
        for num_steps in chains:
            steps = [Feed((0,), (at,), (at,), 0, ((2 << at) - 1,)) for at in range(num_steps)]
            for choice in choices:
                inputs = choice_inputs(Sampling(1.0), [0] * num_steps, self.loaded.vocab_size)
                self.run_chain(steps, choice, inputs)

    def free(self) -> None:
        """Free the cache's memory; nothing can be run afterwards."""
        self._backend = None

    @property
    def is_captured(self) -> bool:
        """True if the backend runs recordings (CUDA graphs)."""
        return self._backend is not None and self._backend.is_captured

    def _round_up(self, total: int) -> int:
        """Return how many slots a pass covers that needs `total`."""
        rounded = captured_len(total) if self.is_captured else in_steps(total)
        return min(rounded, self._most_visible)

    def _num_visible(self, feed: Feed) -> int:
        """Return how many slots of its lane the pass of a feed covers."""
        needed = feed.total
        assert needed <= self.capacity, f"{needed} slots, but the cache has {self.capacity}"
        if self._total is None:
            assert self.fixed_rows is None, "reproducible mode needs set_total"
            return self._round_up(needed)
        assert needed <= self._total, f"{needed} slots, but the session was set to {self._total}"
        return self._total

    def _count_for(self, parts: Collection[Any]) -> int | None:
        """Return how many rows each lane ([5 or more, n]) is padded to; None: no padding."""
        assert self._backend is not None, "this executor was freed"
        most = max(rows.shape[1] for rows in parts)
        if self.fixed_rows is not None:
            assert most <= self.fixed_rows, f"{most} rows, but they are fixed at {self.fixed_rows}"
            return self.fixed_rows
        if len(parts) > 1 and not self.is_captured:
            return None  # no recording needs a certain number of rows
        return next((n for n in self._backend.row_counts if n >= most), None)

    def _exceeds_recordings(self, feeds: Sequence[Feed]) -> bool:
        """True if a decode pass has more rows in a lane than any recording; no prompt is one."""
        if not self.is_captured or self.fixed_rows is not None or feeds[0].masks is None:
            return False
        return max(len(feed.tokens) for feed in feeds) > max(self.row_counts, default=0)

    def _lanes_for(self, fed: Collection[int]) -> Iterable[int]:
        """Return the lanes of a padded pass; `fed` are those that have rows.

        In reproducible mode all, or the pass's only one; else 2, 4, 8, ... as recordings have.
        """
        if self.fixed_rows is not None and self.num_lanes_per_pass > 1:
            return range(self.lanes.count)
        count = next(count for count in lane_counts(self.lanes.count) if count >= len(fed))
        others = (lane for lane in range(self.lanes.count) if lane not in fed)
        return (*fed, *islice(others, count - len(fed)))

    def _scratch(self, lane: int) -> int:
        """Return the first scratch slot of a lane, as a slot of the whole cache."""
        return self.lanes.first_slot(lane) + self._most_visible
