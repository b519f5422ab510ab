"""Run an EAGLE head behind the interface of `Executor`: passes laid out by a `SlotMap`, one layer.

Each slot of the cache holds a row's key and value, its state (the hidden state that the next row
starts from, `eagle_layer.py`), and a bit that says whether the slot holds anything at all. Owns
these. Rolling back, moving and copying work as in the ordinary cache, with state and bit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.checkpoint.files import one_line
from engine.device import pin_ahead, send
from engine.errors import kind_of
from engine.executor import Executor
from engine.forward.cache_tensors import zeros
from engine.forward.forward import (
    Layers,
    Output,
    over_all,
)
from engine.forward.lane_attention import LaneAttention
from engine.forward.masks import Masks, from_words
from engine.forward.operators import Product
from engine.heads.dflash import DFlash
from engine.heads.eagle_layer import EagleHead
from engine.heads.eagle_on_cpu import own_layer
from engine.heads.layouts import rotations
from engine.heads.loaded import LoadedHead
from engine.heads.medusa import Medusa
from engine.heads.waves import Integers, Slots, Wave
from engine.layout.slots import Feed, LaneLayout, Move, copied, in_steps
from engine.room import FEWEST_PROMPT_ROWS, PROMPT_ROWS


@dataclass(frozen=True, slots=True)
class EaglePass:
    """A pass of an EAGLE head, ready to run.

    waves     groups of rows, in the order in which they run
    held      [k] int64: slots of the cache, layer behind layer, that now hold a row and did not
    empty     [k] int64: slots, likewise, that held a row and no longer do
    num_visible  number of slots of each lane that the pass covers
    num_asked  number of rows whose logits are returned
    """

    waves: Sequence[Wave]
    held: Integers
    empty: Integers
    num_visible: int
    num_asked: int


class Layered(Protocol):
    """A head that is one layer, whose rows start from states: an `EagleHead` or an `MtpHead`."""

    @property
    def config(self) -> Any:
        """Return its sizes; `width` and `draft_vocab` are among them."""

    @property
    def targets(self) -> torch.Tensor | None:
        """Return the target's token of each column of the logits; None: the same ids."""

    @property
    def is_ascending(self) -> bool:
        """Return True if `targets` ascend."""

    @property
    def states(self) -> Product:
        """Return the function: features -> states [n, width] that rows start from."""

    @property
    def last_norm(self) -> Product:
        """Return the function: states -> what the output matrix reads."""

    def own_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return logits [n, draft_vocab] float32."""


def _layered(loaded: LoadedHead) -> Layered:
    assert not isinstance(loaded.module, Medusa | DFlash), "these have executors of their own"
    return loaded.module


class EagleExecutor(Executor):
    """Runs an EAGLE head with a cache of `num_lanes` lanes (one per text) of `capacity` slots.

    `Feed.before` and `Feed.features` say which hidden state each row starts from. The logits of
    absent rows are zeros.
    """

    backend = "eagle"
    _num_layers = 1

    def __init__(self, loaded: LoadedHead, capacity: int, *, num_lanes: int = 1) -> None:
        """Allocate the cache for texts of at most `capacity` slots.

        Raises:
            ModelError: it does not fit into memory.
        """
        self.loaded, self._head = loaded, _layered(loaded)
        self.capacity = capacity
        self.num_lanes_per_pass = num_lanes
        self.lanes = LaneLayout(num_lanes, capacity)
        self._device, self._dtype = loaded.device, loaded.dtype
        self._slots = Slots(self.lanes, self._num_layers)
        self._masks = Masks(self._dtype)
        try:
            self._allocate()
        except (RuntimeError, ValueError) as error:
            raise kind_of(error)(
                f"{loaded.name}: no cache of {self.lanes.total} slots on {self._device} "
                f"({one_line(error)}); try a shorter maximum length"
            ) from error

    def _allocate(self) -> None:
        """Allocate keys and values, states and the tables that all passes use."""
        total, num_layers = self.lanes.total, self._num_layers
        shape = total, num_layers * self._head.config.width
        self._states = zeros(shape, self._dtype, self._device)  # of a slot layer by layer
        # Added like a mask: 0 for a slot that holds a row, else the lowest number. The minimum with
        # a pass's mask hides empty slots.
        self._lowest = float(torch.finfo(self._dtype).min)
        self._hidden = self._states.new_full((num_layers, total), self._lowest)
        self._allocate_keys()

    def _allocate_keys(self) -> None:
        """Allocate keys and values, and what the layer itself uses."""
        assert isinstance(self._head, EagleHead)
        self._eagle = self._head
        config = self._eagle.config
        shape = 2 * config.num_kv_heads, self.lanes.total, config.dim
        self._cache = zeros(shape, self._dtype, self._device)
        num_positions = min(self.capacity, self.loaded.max_model_len)
        self._rotations = rotations(config.rope, num_positions, self._dtype).to(self._device)
        group = config.num_heads // config.num_kv_heads
        self._attention = LaneAttention(self._cache[None], self.lanes, group, config.dim**-0.5)
        self._own = own_layer(self._eagle, self._cache)

    def lay_out(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> EaglePass:
        """Lay out a pass on the host and return it; run it before another is laid out."""
        assert 0 < len(feeds) <= self.num_lanes_per_pass
        assert len({feed.lane for feed in feeds}) == len(feeds), "two feeds of one lane"
        assert len(feeds) == 1 or all(feed.masks is not None for feed in feeds)
        assert max(max(feed.positions) for feed in feeds) < self.loaded.max_model_len
        needed = max(feed.total for feed in feeds)
        assert needed <= self.capacity, f"{needed} slots, but the cache has {self.capacity}"
        num_visible = min(in_steps(needed), self.capacity)
        waves, held, empty = self._slots.waves(feeds, asks)
        return EaglePass(waves, held, empty, num_visible, sum(map(len, asks)))

    def forward(self, step: EaglePass, layers: Layers = ()) -> Output:
        """Run a pass on the device; return logits [num_asked, V] float32. `layers` must be ()."""
        assert not layers, "a head hands out no features"
        with torch.inference_mode():
            self._note(step.held, 0.0)
            self._note(step.empty, self._lowest)
            parts = [self._logits_of(wave, step.num_visible) for wave in step.waves]
            places = [place for wave in step.waves for place in wave.places]
            if places == list(range(step.num_asked)) and parts:
                return self._output(parts[0] if len(parts) == 1 else torch.cat(parts))
            made = torch.zeros(step.num_asked, self._head.config.draft_vocab, device=self._device)
            if places:
                where = send(torch.tensor(places), self._device)
                made.index_copy_(0, where, torch.cat(parts))
            return self._output(made)

    def _output(self, logits: torch.Tensor) -> Output:
        """Return logits of the draft vocabulary [k, D] as the pass's output.

        A CPU chooses among the tokens that the head can draft, a GPU among all.
        """
        ids = self._head.targets
        if ids is None or (self._device.type == "cpu" and self._head.is_ascending):
            return Output(logits, ids=ids)
        return Output(over_all(logits, ids, self.loaded.vocab_size))

    def run_together(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run several lanes' rows as one pass; return the logits [k, V] of each, concatenated."""
        out = self.forward(self.lay_out(feeds, asks))
        return over_all(out.logits, out.ids, self.loaded.vocab_size)

    def _note(self, slots: Integers, value: float) -> None:
        """Make slots visible (`value` 0) or hidden (the lowest number) in all later masks."""
        if len(slots):
            where = send(torch.from_numpy(slots), self._device)
            self._hidden.view(-1).index_fill_(0, where, value)

    def _logits_of(self, wave: Wave, num_visible: int) -> torch.Tensor:
        """Run a wave; return the logits [k, D] float32 of its k wanted rows."""
        on_host = torch.from_numpy(wave.rows)
        normed = self._computed_here(wave, on_host)
        is_normed = normed is not None
        if normed is None:
            rows = send(on_host, self._device)
            normed = self._compute(wave, rows, self._mask(wave, on_host, rows, num_visible))
        wanted = wave.wanted
        if len(wanted) != len(normed) or any(row != i for i, row in enumerate(wanted)):
            normed = normed[send(torch.tensor(wanted, dtype=torch.int64), self._device)]
        if not is_normed and len(normed):
            normed = self._head.last_norm(normed)
        return self._head.own_logits(normed)

    def _computed_here(self, wave: Wave, rows: torch.Tensor) -> torch.Tensor | None:
        """Run a wave's rows by our C++ as `_compute`; return what the output matrix reads.

        None: it was not run, because this head or what the rows see is not for that.
        """
        if self._own is None:
            return None
        sight = self._own.sight(wave.rows, wave.spans, self._slots.are_held)
        if sight is None:
            self._own.note(rows)
            return None
        ids, positions, slots = rows.unbind()[:3]
        turns = self._rotations.index_select(1, positions)
        normed, states = self._own.run(ids, self._states_before(wave), turns, slots, sight)
        self._states.index_copy_(0, slots, states)
        return normed

    def _mask(
        self, wave: Wave, on_host: torch.Tensor, rows: torch.Tensor, num_visible: int
    ) -> torch.Tensor:
        """Return the mask [1, 1, n, num_visible] of a wave, which hides empty slots too."""
        counts = tuple(span.num_rows for span in wave.spans)
        if self._device.type == "cpu":
            mask = self._masks.build(on_host, num_visible, counts if len(counts) > 1 else ())
        else:
            mask = from_words(rows[3:], num_visible, self._dtype)
        return self._hide_empty(mask, wave)

    def _hide_empty(self, mask: torch.Tensor, wave: Wave) -> torch.Tensor:
        """Return a wave's mask, which hides empty slots too."""
        hidden, num_visible = self._hidden[0], mask.shape[3]
        parts = [hidden.narrow(0, span.first_slot, num_visible) for span in wave.spans]
        if len(parts) == 1:
            return torch.minimum(mask, parts[0])
        # Not `repeat_interleave`: with different counts it makes the host wait for the GPU.
        held = [
            part.expand(span.num_rows, -1) for part, span in zip(parts, wave.spans, strict=True)
        ]
        return torch.minimum(mask, torch.cat(held))

    def _compute(self, wave: Wave, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run a wave's rows, write their keys, values and states; return the states [n, width]."""
        ids, positions, slots = rows.unbind()[:3]
        made = self._attention.projections(len(ids))
        qkv, residual = self._eagle.enter(ids, self._states_before(wave))
        made.heads.copy_(qkv)
        cos, sin = self._rotations.index_select(1, positions)
        torch.cat(made.halves, dim=-1, out=made.swapped)
        made.turned.mul_(cos).addcmul_(made.swapped, sin)
        self._cache.index_copy_(1, slots, made.written)
        plan = self._attention.plan(made.apart, wave.spans, (mask,), mask.shape[3])
        attended = self._attention.attend(plan, next(iter(plan.layers)))
        states = self._eagle.leave(residual, attended)
        self._states.index_copy_(0, slots, states)
        return states

    def _states_before(self, wave: Wave) -> torch.Tensor:
        """Return the states [n, width] that rows start from: of features, or of rows before."""
        given = self._given(wave) if wave.given else None
        if given is not None and len(wave.given) == len(wave.before):
            return given
        states = self._states.index_select(0, send(torch.from_numpy(wave.before), self._device))
        if given is not None:
            states.index_copy_(0, send(torch.tensor(wave.given), self._device), given)
        return states

    def _given(self, wave: Wave) -> torch.Tensor:
        """Return the states [k, width] made of a wave's k given features."""
        features = self.loaded.features_of(wave.features, len(wave.given))
        return self._head.states(send(features, self._device).to(self._dtype))

    def move(self, *moves: Move) -> None:
        """Copy cache slots of all lanes, and the states kept for them (see `Executor.move`)."""
        pair = np.array(copied(moves, self.lanes), dtype=np.int64)
        self._slots.move(*pair)
        sources, targets = send(torch.from_numpy(pair), self._device)
        with torch.inference_mode():
            self._move_keys(sources, targets)
            for held in (self._states, self._hidden.t()):
                held.index_copy_(0, targets, held.index_select(0, sources))

    def _move_keys(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy keys and values between slots, all reads before any write."""
        self._cache.index_copy_(1, targets, self._cache.index_select(1, sources))
        if self._own is not None:
            self._own.move(sources, targets)

    def copy_prefix(self, source_lane: int, target_lane: int, length: int) -> None:
        """Copy the first `length` slots of one lane, and the states kept for them, to another."""
        assert source_lane != target_lane
        assert 0 < length <= self.capacity
        source, target = map(self.lanes.first_slot, (source_lane, target_lane))
        where = np.arange(length)
        self._slots.move(source + where, target + where)
        with torch.inference_mode():
            self._copy_keys(source, target, length)
            for held in (self._states, self._hidden.t()):
                held.narrow(0, target, length).copy_(held.narrow(0, source, length))

    def _copy_keys(self, source: int, target: int, length: int) -> None:
        """Copy keys and values of `length` slots from `source` on to those from `target` on."""
        there = self._cache
        there.narrow(1, target, length).copy_(there.narrow(1, source, length))
        if self._own is not None:
            self._own.copy(source, target, length)

    def wipe(self, lane: int, start: int) -> None:
        """Write zeros to the keys, values and states of a lane's slots from `start` on."""
        first, length = self.lanes.first_slot(lane) + start, self.capacity - start
        with torch.inference_mode():
            self._wipe_keys(first, length)
            self._states.narrow(0, first, length).zero_()

    def _wipe_keys(self, first: int, length: int) -> None:
        """Write zeros to keys and values of `length` slots from `first` on."""
        self._cache.narrow(1, first, length).zero_()

    def warm_up(self, row_counts: Iterable[int]) -> dict[int, float]:
        """Run passes of each number of rows; return number of rows -> seconds of a pass.

        Call it before any text is opened. All timed rows follow one row that has a feature, like
        the children of one tree node.
        """
        feature = bytes(self.loaded.feature_bytes)
        self.run(Feed((0,), (1,), (1,), 0, (2,), before=(0,), features=(feature,)), (0,))
        seconds: dict[int, float] = {}
        for num_rows in row_counts:
            if 2 + num_rows > self.capacity:
                break
            where = tuple(range(2, 2 + num_rows))
            masks = tuple(1 << i for i in range(num_rows))
            shape = (0,) * num_rows, (2,) * num_rows, where, 2, masks
            feed = Feed(*shape, before=(1,) * num_rows)
            self.run(feed, range(num_rows))
            seconds[num_rows] = self.seconds_of(feed)
        pin_ahead(PROMPT_ROWS * self.loaded.feature_bytes, self._states)
        self.forget()
        return seconds

    def warm_up_prompts(self) -> None:
        """Run chunks of a prompt, and what a text that begins like another does, on a GPU.

        A GPU loads a kernel at its first call and allocates memory at its first use. Call it before
        any text is opened.
        """
        most, num_rows = min(PROMPT_ROWS, self.capacity - 1), FEWEST_PROMPT_ROWS // 2
        most = min(most, self.loaded.max_model_len - 1)
        feature = bytes(self.loaded.feature_bytes)
        while num_rows < most:
            num_rows *= 2
            where = tuple(range(1, min(num_rows, most) + 1))
            before, features = tuple(at - 1 for at in where), (feature,) * len(where)
            shape = (0,) * len(where), where, where, 1
            feed = Feed(*shape, None, before=before, features=features)
            self.run(feed, (len(where) - 1,))
        if self.lanes.count > 1:
            self.copy_prefix(0, 1, 1)
        self.wipe(0, 0)
        self.forget()

    def forget(self) -> None:
        """Mark all slots as empty; call it only while no text is open."""
        self._slots = Slots(self.lanes, self._num_layers)
        self._hidden.fill_(self._lowest)

    def free(self) -> None:
        """Free the cache's memory; nothing can be run afterwards."""
        self._free_keys()
        del self._states, self._hidden

    def _free_keys(self) -> None:
        """Free the memory of keys and values, and what the layer itself uses."""
        del self._cache, self._attention, self._own
