"""What a node knows of a model or a head (`Executor`), and how the passes of a model are run.

A `SlotMap` lays passes out, and a `ModelExecutor` runs them: one model, one cache. Owns padding and
rounding (which shapes reach the model) and the way from integers to tensors. Knows no tree and no
message. Two modes:

    normal        a pass has as many rows as it was given, or as many as the backend has a program
                  for; the number of visible slots is rounded up, to a multiple of 64 or more
    reproducible  `fixed_rows` = R: every pass but a prefill has R rows, the missing ones written to
                  scratch slots behind the cache, and `set_total` fixes the visible slots for a
                  session, so that a row's last bits do not depend on what it is computed with
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, Protocol

import numpy as np
import torch

from engine.checkpoint.model import LoadedModel
from engine.choice.coupling_on_gpu import Choice, choice_inputs, record_choices, try_choices
from engine.choice.sampling import Sampling
from engine.device import pin_ahead, send
from engine.forward.backends import make_backend
from engine.forward.flex_attention import BLOCK
from engine.forward.forward import (
    FEWEST_PROMPT_ROWS,
    PROMPT_ROWS,
    Backend,
    Layers,
    Output,
    Say,
    Spans,
    check_layers,
    filled,
    filled_prompt,
    rows_of,
    silent,
)
from engine.forward.graphs import captured_len
from engine.forward.masks import MASK_BITS
from engine.layout.slots import Feed, LaneLayout, Move, Span, copied, in_steps, lane_counts

_NUM_TIMED = 3  # passes of a shape; the quickest counts


@dataclass(frozen=True, slots=True)
class ModelPass:
    """A pass, ready to run; tensors on the CPU.

    rows, spans  as in `Backend.forward`
    num_asked    rows whose logits are wanted
    keep         [num_asked] int64: which; None: those from `start` on
    start        the first row whose logits are wanted, if these are consecutive
    is_padded    filled up to a number of rows that is fixed, or that there is a program for; the
                 logits of all rows are computed
    fed          the rows of each feed, feed by feed; all others fill it up
    """

    rows: torch.Tensor
    spans: Spans
    num_visible: int
    num_asked: int
    keep: torch.Tensor | None
    is_padded: bool
    fed: tuple[slice, ...]
    start: int = 0


class Executor(Protocol):
    """Runs the passes of one model, or of one head (`heads/`): all that a node knows of either.

    capacity            slots of each lane
    lanes               how the cache is divided among texts, a lane each
    num_lanes_per_pass  most lanes that share a pass
    fixed_rows          rows of every pass in reproducible mode; None: the normal mode
    """

    capacity: int
    lanes: LaneLayout
    num_lanes_per_pass: int
    fixed_rows: int | None = None

    @property
    def backend(self) -> str:
        """The name of the forward that runs."""

    @property
    def num_uncaptured(self) -> int:
        """Decode passes that a captured backend had no recording for."""
        return 0

    @property
    def num_late(self) -> int:
        """Recordings that a captured backend has made since it was loaded."""
        return 0

    def can_chain(self, feeds: Sequence[Feed], choice: Choice) -> bool:
        """Whether `run_chain` may be called: there is a recording of these steps."""
        del feeds, choice
        return False

    def set_total(self, total: int | None) -> None:
        """Let every pass cover `total` slots until told otherwise; None: as many as it needs.

        A head has no reproducible mode, and covers what it needs.
        """
        assert total is None, f"{self.backend} has no reproducible mode"

    def lay_out(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> Any:
        """The first half of a pass, on the host; returns what `forward` takes.

        feeds  of different lanes, at most `num_lanes_per_pass`
        asks   for each feed the rows whose logits are wanted
        """

    def forward(self, step: Any, layers: Layers = ()) -> Output:
        """The second half, on the device.

        step    as `lay_out` has returned it
        layers  whose hidden states are wanted (`forward.py`); a head hands out none

        Returns logits float32, in the order of `asks`, and features of all rows, feed by feed; both
        are valid until the next pass.
        """

    def run(self, feed: Feed, ask: Sequence[int]) -> torch.Tensor:
        """Run one pass: write its keys and values, return the logits of the rows named in `ask`.

        Returns [len(ask), V] float32 on the model's device, in the order of `ask`, which may be
        empty: what nobody asks for is not computed (but for padded passes, which are all alike).
        They are the caller's own.
        """
        return self.run_together((feed,), (ask,))

    def run_together(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run the passes of several lanes as one, which reads the weights once.

        Returns what `run` does of each, one below the other.
        """
        return self.forward(self.lay_out(feeds, asks)).logits

    def run_chain(
        self, feeds: Sequence[Feed], choice: Choice, inputs: torch.Tensor
    ) -> torch.Tensor:
        """Run steps of one row each, each of the token that was chosen after the one before.

        Only where `can_chain`.

        feeds   of one lane; only the first one's token counts
        choice  of one token, made after each step
        inputs  [n + NUM_SETTINGS] int64: `choice_inputs` of the steps

        Returns [n, 3] float64 on the device (`chosen_there` fetches it), valid until the next call.
        """
        del feeds, choice, inputs
        raise AssertionError(f"{self.backend} has no recordings")

    def move(self, *moves: Move) -> None:
        """Copy cache slots as `SlotMap.advance` says, of all lanes in one gather."""

    def copy_prefix(self, source_lane: int, target_lane: int, length: int) -> None:
        """Copy the first `length` slots of a lane to another: texts that begin alike."""

    def wipe(self, lane: int, start: int) -> None:
        """Write zeros to all slots of a lane from `start` on, its scratch included."""

    def not_finite(self, lane: int) -> int | None:
        """Return the slot of a lane that has brought NaN or infinity (`Backend.not_finite`).

        Asked of a target's model alone.
        """
        del lane
        raise AssertionError(f"{self.backend} does not look for it")

    def seconds_of(self, feed: Feed) -> float:
        """Return what the quickest of some passes takes until one of its numbers is on the host."""
        ask, took_s = range(len(feed.tokens)), []
        for _ in range(_NUM_TIMED):
            started = time.perf_counter()
            self.run(feed, ask)[0, 0].item()
            took_s.append(time.perf_counter() - started)
        return min(took_s)


class ModelExecutor(Executor):
    """A loaded model with a cache of `num_lanes` lanes of `capacity` slots, one for each text."""

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
        """Allocate the cache; `fixed_rows` switches to reproducible mode.

        capacity    slots of each lane
        backend     reference, fused, compiled or graphs (`loading.make_executor` chooses)
        row_counts  for which a backend makes programs or graphs, ascending (but with `fixed_rows`)
        layers      whose hidden states will be asked for (`forward.py`): programs and graphs hand
                    them out

        Raises:
            ModelError: the cache does not fit into memory, the model cannot run a token or has no
                such layers, or the backend does not cover it.
        """
        assert capacity > 0
        assert fixed_rows is None or 0 < fixed_rows <= MASK_BITS
        check_layers(loaded.name, loaded.num_layers, layers)
        self.loaded = loaded
        self.layers = layers
        self.capacity = capacity
        self.fixed_rows = fixed_rows
        row_counts = (fixed_rows,) if fixed_rows else tuple(row_counts)
        # Kernels of a GPU are chosen, and its memory is divided, anew for every number of rows.
        self.pads_prompts = loaded.device.type == "cuda"
        # A GPU's attention copies a mask whose width is no multiple of 8, in every layer.
        is_on_gpu = self.pads_prompts or backend == "graphs"
        self._most_visible = in_steps(capacity) if is_on_gpu else capacity
        # Rows that fill a pass up write to slots of their own, which no pass covers.
        num_slots = self._most_visible + max(row_counts, default=int(self.pads_prompts))
        if backend == "graphs":  # whose attention reads blocks of slots, of one lane each
            num_slots = -(-num_slots // BLOCK) * BLOCK
        self.lanes = LaneLayout(num_lanes, num_slots)
        self.num_lanes_per_pass = num_lanes  # 1 where rows would depend on those of other lanes
        self._num_too_large = 0  # decode passes of more rows than any graph has
        self._total: int | None = None  # visible slots of every pass; None: as the pass needs
        self._backend: Backend | None = make_backend(
            backend, loaded, self.lanes, row_counts, layers
        )

    @property
    def backend(self) -> str:
        """See `Executor`."""
        assert self._backend is not None, "this executor was freed"
        return self._backend.name

    @property
    def row_counts(self) -> Sequence[int]:
        """Numbers of rows that the backend is made for, ascending."""
        assert self._backend is not None, "this executor was freed"
        return self._backend.row_counts

    @property
    def num_uncaptured(self) -> int:
        """See `Executor`."""
        backend = self._backend
        return self._num_too_large + (backend.num_uncaptured if backend is not None else 0)

    @property
    def num_late(self) -> int:
        """See `Executor`."""
        return 0 if self._backend is None else self._backend.num_late

    def take_over(self, say: Say = silent) -> None:
        """Let the backend lay the weights out as it likes; the loaded model may not run again.

        say  is told what takes long
        """
        assert self._backend is not None, "this executor was freed"
        self._backend.take_over(timed=self.fixed_rows is None, say=say)

    def set_total(self, total: int | None) -> None:
        """Let every pass cover `total` slots (rounded up to 64) until told otherwise.

        None goes back to as many as each pass needs, which reproducible mode does not allow.
        """
        assert total is None or 0 < total <= self.capacity
        self._total = None if total is None else self._round_up(total)

    def lay_out(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> ModelPass:
        """The first half of a pass, on the host: from integers to tensors.

        feeds  of different lanes, at most `num_lanes_per_pass`; a chunk of a prefill comes alone
        asks   for each feed the rows whose logits are wanted
        """
        assert 0 < len(feeds) <= self.num_lanes_per_pass
        assert len(feeds) == 1 or all(feed.masks is not None for feed in feeds)
        num_visible = max(map(self._num_visible, feeds))
        if len(feeds) == 1 and (self.fixed_rows is None or self.num_lanes_per_pass == 1):
            return self._lay_out_one(feeds[0], asks[0], num_visible)
        by_lane = {feed.lane: self._rows_of(feed) for feed in feeds}
        assert len(by_lane) == len(feeds), "two feeds of one lane"
        count = None if feeds[0].masks is None else self._count_for(by_lane.values())
        if count is not None:
            for lane in self._lanes_for(by_lane):
                by_lane[lane] = filled(by_lane.get(lane), count, self._scratch(lane))
        elif feeds[0].masks is None and self.pads_prompts:
            by_lane = {at: filled_prompt(rows, self._scratch(at)) for at, rows in by_lane.items()}
        rows, spans, starts = self._joined(by_lane)
        pairs = zip(feeds, asks, strict=True)
        index = [starts[feed.lane] + row for feed, ask in pairs for row in ask]
        fed = tuple(slice(starts[f.lane], starts[f.lane] + len(f.tokens)) for f in feeds)
        keep, made = torch.tensor(index, dtype=torch.int64), torch.from_numpy(rows)
        return ModelPass(
            made, spans, num_visible, len(index), keep, is_padded=count is not None, fed=fed
        )

    def _lay_out_one(self, feed: Feed, ask: Sequence[int], num_visible: int) -> ModelPass:
        """The usual pass has one lane: what a small drafter does on the host is felt."""
        rows = self._rows_of(feed)
        count = None if feed.masks is None else self._count_for((rows,))
        if count is not None:
            rows = filled(rows, count, self._scratch(feed.lane))
        elif feed.masks is None and self.pads_prompts:
            rows = filled_prompt(rows, self._scratch(feed.lane))
        spans = (Span(self.lanes.first_slot(feed.lane), rows.shape[1]),)
        # The logits of other rows lie before and behind those that are asked for: nothing moves.
        are_there = (count is not None or len(ask) == rows.shape[1]) and _are_consecutive(ask)
        keep = None if are_there else torch.tensor(ask, dtype=torch.int64)
        made, fed = torch.from_numpy(rows), (slice(len(feed.tokens)),)
        return ModelPass(
            *(made, spans, num_visible, len(ask), keep),
            is_padded=count is not None,
            fed=fed,
            start=ask[0] if are_there and ask else 0,
        )

    def _joined(self, by_lane: Mapping[int, Any]) -> tuple[Any, Spans, Mapping[int, int]]:
        """Put the rows of all lanes side by side, by lane; also where each begins."""
        spans, starts, num_rows = [], {}, 0
        for lane in sorted(by_lane):
            spans.append(Span(self.lanes.first_slot(lane), by_lane[lane].shape[1]))
            starts[lane] = num_rows
            num_rows += spans[-1].num_rows
        parts = [by_lane[lane] for lane in starts]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return rows, tuple(spans), starts

    def _rows_of(self, feed: Feed) -> Any:
        """Return what the backend must know of the rows of one lane, [5, n] int64."""
        assert max(feed.positions) < self.loaded.max_model_len, "beyond the model's positions"
        return rows_of(feed, self.lanes.first_slot(feed.lane))

    def forward(self, step: ModelPass, layers: Layers = ()) -> Output:
        """The second half of `run`: the model.

        layers  whose hidden states are wanted (`forward.py`); others than those that were said at
                load take longer where passes are programs or graphs

        Returns logits float32, as `run` does, and in the model's type the features of the rows of
        all feeds, feed by feed, also of those whose logits nobody wants.

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
        """See `Executor.run_together`."""
        logits = self.forward(self.lay_out(feeds, asks)).logits
        return logits.clone() if self.is_captured else logits  # the next pass writes there

    def can_chain(self, feeds: Sequence[Feed], choice: Choice) -> bool:
        """See `Executor.can_chain`."""
        if not self.is_captured or self.fixed_rows is not None:
            return False
        assert self._backend is not None
        num_visible = max(map(self._num_visible, feeds))
        return self._backend.has_chain(len(feeds), num_visible=num_visible, choice=choice)

    def run_chain(
        self, feeds: Sequence[Feed], choice: Choice, inputs: torch.Tensor
    ) -> torch.Tensor:
        """See `Executor.run_chain`."""
        assert self._backend is not None, "this executor was freed"
        steps = torch.zeros(6, len(inputs), dtype=torch.int64)
        rows = np.concatenate([self._rows_of(feed) for feed in feeds], axis=1)
        steps[:5, : len(feeds)] = torch.from_numpy(rows)
        steps[5] = inputs
        num_visible = max(map(self._num_visible, feeds))
        return self._backend.chain(steps, num_visible=num_visible, choice=choice)

    def move(self, *moves: Move) -> None:
        """See `Executor.move`."""
        assert self._backend is not None, "this executor was freed"
        self._backend.move(*copied(moves, self.lanes))

    def copy_prefix(self, source_lane: int, target_lane: int, length: int) -> None:
        """See `Executor.copy_prefix`."""
        assert self._backend is not None, "this executor was freed"
        assert source_lane != target_lane
        assert 0 < length <= self.capacity
        lanes = self.lanes
        self._backend.copy(lanes.first_slot(source_lane), lanes.first_slot(target_lane), length)

    def wipe(self, lane: int, start: int) -> None:
        """See `Executor.wipe`."""
        assert self._backend is not None, "this executor was freed"
        assert 0 <= start <= self.capacity
        lanes = self.lanes
        self._backend.wipe(lanes.first_slot(lane) + start, lanes.num_slots - start)

    def not_finite(self, lane: int) -> int | None:
        """See `Executor.not_finite`."""
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
        """Run passes of each number of rows, so that no session pays for a first time.

        A captured backend records passes of each shape at each length, so that none is recorded
        once it is loaded, and

        choices  made of the logits of passes
        beside   made of logits that others compute on this device, as many of a row
        rare     made once, and not recorded
        chains   of so many steps, with each of the choices `chained`
        say      is told how many recordings of how many there are

        Overwrites the first slots: only before a session. Returns the seconds of a pass by its
        rows, over few slots.
        """
        seconds: dict[int, float] = {}
        total, row_counts = self._total, tuple(row_counts)
        totals, lanes = [total or self._round_up(1)], self._lanes_of_passes()
        if self.is_captured:
            row_counts = tuple(self.row_counts)
            while total is None and totals[-1] < self._most_visible:
                totals.append(self._round_up(totals[-1] + 1))
        # The largest first: all others find their memory within what that has taken.
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
            seconds[num_rows] = self.seconds_of(_chain(0, num_rows))
        if self.is_captured and row_counts:
            logits = self._warm_up_choices(choices)
            record_choices((*choices, *beside), logits.clone(), self.row_counts)
            try_choices((*rare, *beside), logits)
        if self.pads_prompts:
            self._warm_up_prompts(total)
        self._total = total
        if self._backend is not None:
            # The token of these passes may be one that no text has, with numbers that are none.
            for lane in range(max(lanes)):
                self.wipe(lane, 0)
            self._backend.is_loading = False
        return seconds

    def _lanes_of_passes(self) -> Sequence[int]:
        """Of how many lanes passes are recorded; in reproducible mode all have all, or all one."""
        if self.fixed_rows is not None or not self.is_captured:
            return (1,)
        return lane_counts(self.num_lanes_per_pass)

    def _warm_up(self, num_lanes: int, num_rows: int) -> None:
        feeds = [_chain(lane, num_rows) for lane in range(num_lanes)]
        for layers in {(), self.layers}:
            self.forward(self.lay_out(feeds, [range(num_rows)] * num_lanes), layers)

    def _warm_up_choices(self, choices: Iterable[Choice]) -> torch.Tensor:
        """Of logits where passes leave them, which are returned.

        Those that are copied from elsewhere are of prompts and of several lanes, or biases and
        penalties have changed them.
        """
        rows = _chain(0, max(self.row_counts))
        logits = self.forward(self.lay_out((rows,), (range(len(rows.tokens)),))).logits
        record_choices(choices, logits, self.row_counts)
        return logits

    def _warm_up_prompts(self, total: int | None) -> None:
        """Chunks of all numbers of rows that there are, last: a recording gives memory back.

        A GPU loads a kernel when it is first called, and finds memory when it is first asked for:
        the texts beside the first prompts would wait for that.
        """
        longest = min(self.capacity, self.loaded.max_model_len)
        self._total = total or self._round_up(longest)
        most, num_rows = min(PROMPT_ROWS, longest), FEWEST_PROMPT_ROWS // 2
        while num_rows < most:
            num_rows *= 2  # or fewer, which are filled up
            where = tuple(range(min(num_rows, most)))
            feed = Feed((0,) * len(where), where, where, 0, None)
            for layers in {(), self.layers}:
                out = self.forward(self.lay_out((feed,), ((len(where) - 1,),)), layers)
                if out.features is not None and num_rows >= most:
                    pin_ahead(out.features.nbytes, out.features)

    def _warm_up_chains(self, chains: Iterable[int], choices: Sequence[Choice]) -> None:
        for num_steps in chains:
            steps = [Feed((0,), (at,), (at,), 0, ((2 << at) - 1,)) for at in range(num_steps)]
            for choice in choices:
                inputs = choice_inputs(Sampling(1.0), [0] * num_steps, self.loaded.vocab_size)
                self.run_chain(steps, choice, inputs)

    def free(self) -> None:
        """Give the cache's memory back; nothing can be run afterwards."""
        self._backend = None

    @property
    def is_captured(self) -> bool:
        """Whether the backend runs recordings."""
        return self._backend is not None and self._backend.is_captured

    def _round_up(self, total: int) -> int:
        rounded = captured_len(total) if self.is_captured else in_steps(total)
        return min(rounded, self._most_visible)

    def _num_visible(self, feed: Feed) -> int:
        needed = feed.total
        assert needed <= self.capacity, f"{needed} slots, but the cache has {self.capacity}"
        if self._total is None:
            assert self.fixed_rows is None, "reproducible mode needs set_total"
            return self._round_up(needed)
        assert needed <= self._total, f"{needed} slots, but the session was set to {self._total}"
        return self._total

    def _count_for(self, parts: Collection[Any]) -> int | None:
        """Up to how many rows each lane of a pass is filled; None: it runs as it is."""
        assert self._backend is not None, "this executor was freed"
        most = max(rows.shape[1] for rows in parts)
        if self.fixed_rows is not None:
            assert most <= self.fixed_rows, (
                f"{most} rows, but reproducible mode is fixed at {self.fixed_rows}"
            )
            return self.fixed_rows
        if len(parts) > 1 and not self.is_captured:
            return None  # programs are of one lane, and rows that nobody needs cost time
        count = next((n for n in self._backend.row_counts if n >= most), None)
        self._num_too_large += count is None and self.is_captured
        return count

    def _lanes_for(self, fed: Collection[int]) -> Iterable[int]:
        """Return the lanes of a pass that is filled up.

        In reproducible mode all of them, or the only one; else those that have rows and as many
        others as a recording of 2, 4, 8, ... lanes needs.
        """
        if self.fixed_rows is not None and self.num_lanes_per_pass > 1:
            return range(self.lanes.count)
        count = next(count for count in lane_counts(self.lanes.count) if count >= len(fed))
        others = (lane for lane in range(self.lanes.count) if lane not in fed)
        return (*fed, *islice(others, count - len(fed)))

    def _scratch(self, lane: int) -> int:
        return self.lanes.first_slot(lane) + self._most_visible


def _chain(lane: int, num_rows: int) -> Feed:
    """A chain of so many rows at the start of a lane."""
    where = tuple(range(num_rows))
    return Feed((0,) * num_rows, where, where, 0, tuple((2 << i) - 1 for i in where), lane)


def _are_consecutive(ask: Sequence[int]) -> bool:
    return not ask or tuple(ask) == tuple(range(ask[0], ask[0] + len(ask)))
