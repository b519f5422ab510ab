"""Run the passes that a `SlotMap` lays out with an EAGLE head: `Executor`'s surface, one layer.

Each slot of the cache holds keys and values, the state that its row hands on to the next
(`eagle_layer.py`), and whether it holds anything at all. Owns these. Rolling back,
moving and copying are as in the ordinary cache: the state and the bit go along.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.checkpoint.files import one_line
from engine.device import pin_ahead, send
from engine.errors import kind_of
from engine.executor import Executor
from engine.forward.forward import PROMPT_ROWS, Layers, Output, rows_of
from engine.forward.lane_attention import LaneAttention
from engine.forward.masks import Masks, from_words
from engine.heads.eagle_layer import EagleHead
from engine.heads.layouts import rotations
from engine.heads.loaded import LoadedHead
from engine.layout.slots import Feed, LaneLayout, Move, Span, copied, in_steps

# -- waves -----------------------------------------------------------------------------------------

# Which rows of a pass of an EAGLE head can run together, and which not at all.
#
# A row needs the feature before it: the target's, where that is given, or else the state that the
# head has computed for the row before. If that row is in the same pass, it has to run first. So a
# pass is a sequence of *waves*; nearly always there is one. A row without either is *absent*: it is
# not computed, its slot holds nothing, and nobody ever sees it. Absent is also what follows an
# absent row without a feature of its own, and a text's first token, before which there is nothing.
#
# Owns which slots hold something. Touches no tensor of a model.

Integers = npt.NDArray[np.int64]

ABSENT = -1  # in place of a wave


@dataclass(frozen=True, slots=True)
class Wave:
    """Rows that run together, lane by lane.

    rows      [5, n] as in `Backend.forward`
    spans     the lanes that they see
    before    [n]: slot of the cache that holds the state before each row; 0 where it is given
    given     rows whose feature before them is given
    features  theirs, one behind the other
    wanted    rows whose logits are wanted
    places    the place of each of those among all that are asked for
    """

    rows: Integers
    spans: tuple[Span, ...]
    before: Integers
    given: Sequence[int]
    features: bytes
    wanted: Sequence[int]
    places: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Laid:
    """One feed: its rows as integers, and in which wave each runs."""

    feed: Feed
    first_slot: int
    rows: Integers
    waves: Sequence[int]
    ask: Sequence[int]
    first_place: int


class Slots:
    """Which slots of a cache hold something."""

    def __init__(self, lanes: LaneLayout) -> None:
        self._lanes = lanes
        self.are_held = np.zeros(lanes.total, dtype=np.bool_)

    def waves(
        self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]
    ) -> tuple[list[Wave], Integers, Integers]:
        """Divide a pass into waves, and note what its slots will hold.

        Returns also the slots of the cache that hold something from now on and did not, and those
        that did and do not. The pass has to be run before another is laid out.
        """
        if len(feeds) == 1 and len(feeds[0].tokens) == 1:
            return self._only_row(feeds[0], len(asks[0]))
        laid, place = [], 0
        for feed, ask in zip(feeds, asks, strict=True):
            first_slot = self._lanes.first_slot(feed.lane)
            rows = rows_of(feed, first_slot)
            waves = self._waves_of(feed, first_slot)
            laid.append(_Laid(feed, first_slot, rows, waves, ask, place))
            place += len(ask)
        laid.sort(key=lambda one: one.first_slot)
        written = np.concatenate([one.rows[2] for one in laid])
        hold = np.concatenate([np.array(one.waves) for one in laid]) != ABSENT
        changed = self.are_held[written] != hold
        self.are_held[written] = hold
        last = max(max(one.waves) for one in laid)
        made = [_wave(laid, number) for number in range(last + 1)]
        return made, written[changed & hold], written[changed & ~hold]

    def _only_row(self, feed: Feed, num_asked: int) -> tuple[list[Wave], Integers, Integers]:
        """The same of the usual step of a drafter: what it costs on the host is felt."""
        first_slot, (slot,), (before,) = self._lanes.first_slot(feed.lane), feed.slots, feed.before
        given = feed.features[0] if feed.features else b""
        is_known = bool(given) or (given is not None and bool(self.are_held[first_slot + before]))
        holds, written = before >= 0 and is_known, np.array((first_slot + slot,))
        changed = written if bool(self.are_held[written[0]]) != holds else written[:0]
        self.are_held[written] = holds
        if not holds:
            return [], written[:0], changed
        wave = Wave(
            rows=rows_of(feed, first_slot),
            spans=(Span(first_slot, 1),),
            before=np.array((0 if given else first_slot + before,)),
            given=(0,) if given else (),
            features=given or b"",
            wanted=(0,) * num_asked,
            places=range(num_asked),
        )
        return [wave], changed, written[:0]

    def _waves_of(self, feed: Feed, first_slot: int) -> list[int]:
        """The wave of each row, or ABSENT.

        A row sees those above it on its path, so it never runs before them, and after the one right
        above it if it needs its state.
        """
        waves: list[int] = []
        of_slot: dict[int, tuple[int, bool]] = {}  # by slot of this pass: its wave, whether absent
        features = feed.features or (b"",) * len(feed.tokens)
        for slot, before, given in zip(feed.slots, feed.before, features, strict=True):
            above = of_slot.get(before)
            if above is None:
                earliest = 0
                is_known = before >= 0 and bool(self.are_held[first_slot + before])
            else:
                earliest, is_known = above[0], not above[1]
            is_absent = before < 0 or given is None or not (given or is_known)
            if above is not None and not given and not is_absent:
                earliest += 1
            of_slot[slot] = earliest, is_absent
            waves.append(ABSENT if is_absent else earliest)
        return waves

    def move(self, read: Integers, written: Integers) -> None:
        """Slots were copied; all reads came first."""
        self.are_held[written] = self.are_held[read]


def _wave(laid: Sequence[_Laid], number: int) -> Wave:
    """Put the rows of one wave side by side, by lane."""
    parts: list[Integers] = []
    spans: list[Span] = []
    before: list[int] = []
    given: list[int] = []
    features: list[bytes] = []
    wanted: list[int] = []
    places: list[int] = []
    for one in laid:
        rows = [row for row, wave in enumerate(one.waves) if wave == number]
        if not rows:
            continue
        start = len(before)
        where = {row: start + i for i, row in enumerate(rows)}
        for row in rows:
            feature = one.feed.features[row] if one.feed.features else b""
            before.append(0 if feature else one.first_slot + one.feed.before[row])
            if feature:
                given.append(where[row])
                features.append(feature)
        asked = [(where[row], place) for place, row in enumerate(one.ask) if row in where]
        wanted += (row for row, _ in asked)
        places += (one.first_place + place for _, place in asked)
        parts.append(one.rows if len(rows) == len(one.waves) else one.rows[:, rows])
        spans.append(Span(one.first_slot, len(rows)))
    rows_made = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return Wave(
        rows=np.ascontiguousarray(rows_made),
        spans=tuple(spans),
        before=np.array(before, dtype=np.int64),
        given=given,
        features=b"".join(features),
        wanted=wanted,
        places=places,
    )


# -- eagle -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EaglePass:
    """A pass, ready to run.

    waves     in their order
    held      [k] slots of the cache that hold something from now on and did not
    empty     [k] slots that did, and do not
    """

    waves: Sequence[Wave]
    held: Integers
    empty: Integers
    num_visible: int
    num_asked: int


class EagleExecutor(Executor):
    """An EAGLE head with a cache of `num_lanes` lanes of `capacity` slots, one for each text.

    What a row is given is in `Feed.before` and `Feed.features`. Logits of absent rows are zeros.
    """

    backend = "eagle"

    def __init__(self, loaded: LoadedHead, capacity: int, *, num_lanes: int = 1) -> None:
        """Allocate the cache.

        Raises:
            ModelError: it does not fit into memory.
        """
        assert isinstance(loaded.module, EagleHead), "Medusa heads have no cache"
        self.loaded, self._head = loaded, loaded.module
        self.capacity = capacity
        self.num_lanes_per_pass = num_lanes
        self.lanes = LaneLayout(num_lanes, capacity)
        self._device, self._dtype = loaded.device, loaded.dtype
        self._slots = Slots(self.lanes)
        self._masks = Masks(self._dtype)
        try:
            self._allocate()
        except (RuntimeError, ValueError) as error:
            raise kind_of(error)(
                f"{loaded.name}: no cache of {self.lanes.total} slots on {self._device} "
                f"({one_line(error)}); try a shorter maximum length"
            ) from error

    def _allocate(self) -> None:
        config, total = self._head.config, self.lanes.total
        shape = 2 * config.num_kv_heads, total, config.dim
        self._cache = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._states = self._cache.new_zeros(total, config.width)
        # Where a slot holds nothing no mask shows it: the lower one counts.
        self._lowest = float(torch.finfo(self._dtype).min)
        self._hidden = self._cache.new_full((total,), self._lowest)
        num_positions = min(self.capacity, self.loaded.max_model_len)
        self._rotations = rotations(config.rope, num_positions, self._dtype).to(self._device)
        group = config.num_heads // config.num_kv_heads
        self._attention = LaneAttention(self._cache[None], self.lanes, group, config.dim**-0.5)

    def lay_out(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> EaglePass:
        """The first half of a pass, on the host; it has to be run before another is laid out."""
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
        """The second half: the head. Nobody may ask a head for features."""
        assert not layers, "a head hands out no features"
        with torch.inference_mode():
            self._note(step.held, 0.0)
            self._note(step.empty, self._lowest)
            parts = [self._logits_of(wave, step.num_visible) for wave in step.waves]
            places = [place for wave in step.waves for place in wave.places]
            if places == list(range(step.num_asked)) and parts:
                return Output(parts[0] if len(parts) == 1 else torch.cat(parts))
            made = torch.zeros(step.num_asked, self.loaded.vocab_size, device=self._device)
            if places:
                where = send(torch.tensor(places), self._device)
                made.index_copy_(0, where, torch.cat(parts))
            return Output(made)

    def _note(self, slots: Integers, value: float) -> None:
        """What a mask may show of these slots at most."""
        if len(slots):
            self._hidden.index_fill_(0, send(torch.from_numpy(slots), self._device), value)

    def _logits_of(self, wave: Wave, num_visible: int) -> torch.Tensor:
        """Run a wave; return the logits of its rows that are wanted."""
        on_host = torch.from_numpy(wave.rows)
        rows = send(on_host, self._device)
        states = self._compute(wave, rows, self._mask(wave, on_host, rows, num_visible))
        wanted = wave.wanted
        if len(wanted) != len(states) or any(row != i for i, row in enumerate(wanted)):
            states = states[send(torch.tensor(wanted, dtype=torch.int64), self._device)]
        return self._head.logits(states)

    def _mask(
        self, wave: Wave, on_host: torch.Tensor, rows: torch.Tensor, num_visible: int
    ) -> torch.Tensor:
        """Return [1, 1, n, num_visible]: what the words of the rows show, and slots hold."""
        counts = tuple(span.num_rows for span in wave.spans)
        if self._device.type == "cpu":
            mask = self._masks.build(on_host, num_visible, counts if len(counts) > 1 else ())
        else:
            mask = from_words(rows[3:], num_visible, self._dtype)
        parts = [self._hidden.narrow(0, span.first_slot, num_visible) for span in wave.spans]
        if len(parts) == 1:
            return torch.minimum(mask, parts[0])
        # Not by `repeat_interleave`: of different numbers, a GPU would be waited for their sum.
        held = [part.expand(count, -1) for part, count in zip(parts, counts, strict=True)]
        return torch.minimum(mask, torch.cat(held))

    def _compute(self, wave: Wave, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Write keys, values and states of a wave; return its states [n, width]."""
        ids, positions, slots = rows.unbind()[:3]
        made = self._attention.projections(len(ids))
        qkv, residual = self._head.enter(ids, self._states_before(wave))
        made.heads.copy_(qkv)
        cos, sin = self._rotations.index_select(1, positions)
        torch.cat(made.halves, dim=-1, out=made.swapped)
        made.turned.mul_(cos).addcmul_(made.swapped, sin)
        self._cache.index_copy_(1, slots, made.written)
        plan = self._attention.plan(made.apart, wave.spans, mask)
        attended = self._attention.attend(plan, next(iter(plan.seen)))
        states = self._head.leave(residual, attended)
        self._states.index_copy_(0, slots, states)
        return states

    def _states_before(self, wave: Wave) -> torch.Tensor:
        """Return what is before each row [n, width]: by the target's feature, or by the head."""
        given = self._given(wave) if wave.given else None
        if given is not None and len(wave.given) == len(wave.before):
            return given
        states = self._states.index_select(0, send(torch.from_numpy(wave.before), self._device))
        if given is not None:
            states.index_copy_(0, send(torch.tensor(wave.given), self._device), given)
        return states

    def _given(self, wave: Wave) -> torch.Tensor:
        """Return the states [k, width] of the features that a wave is given."""
        features = self.loaded.features_of(wave.features, len(wave.given))
        return self._head.states(send(features, self._device).to(self._dtype))

    def move(self, *moves: Move) -> None:
        """See `Executor.move`."""
        pair = np.array(copied(moves, self.lanes), dtype=np.int64)
        self._slots.move(*pair)
        sources, targets = send(torch.from_numpy(pair), self._device)
        with torch.inference_mode():
            self._cache.index_copy_(1, targets, self._cache.index_select(1, sources))
            for held in (self._states, self._hidden):
                held.index_copy_(0, targets, held.index_select(0, sources))

    def copy_prefix(self, source_lane: int, target_lane: int, length: int) -> None:
        """See `Executor.copy_prefix`."""
        assert source_lane != target_lane
        assert 0 < length <= self.capacity
        source, target = map(self.lanes.first_slot, (source_lane, target_lane))
        where = np.arange(length)
        self._slots.move(source + where, target + where)
        with torch.inference_mode():
            for held, dim in ((self._cache, 1), (self._states, 0), (self._hidden, 0)):
                held.narrow(dim, target, length).copy_(held.narrow(dim, source, length))

    def wipe(self, lane: int, start: int) -> None:
        """See `Executor.wipe`."""
        first, length = self.lanes.first_slot(lane) + start, self.capacity - start
        with torch.inference_mode():
            self._cache.narrow(1, first, length).zero_()
            self._states.narrow(0, first, length).zero_()

    def warm_up(self, row_counts: Iterable[int]) -> dict[int, float]:
        """As `ModelExecutor.warm_up`: seconds of a pass by its rows; only before a session.

        All rows follow one whose feature is given, as the children of a node do.
        """
        if self._device.type == "cpu":
            self._attention.choose_forms()
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

    def forget(self) -> None:
        """From now on no slot holds anything; only between sessions."""
        self._slots = Slots(self.lanes)
        self._hidden.fill_(self._lowest)

    def free(self) -> None:
        """Give the cache's memory back; nothing can be run afterwards."""
        del self._cache, self._states, self._hidden, self._attention
