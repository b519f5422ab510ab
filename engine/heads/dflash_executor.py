"""Runs a DFlash head behind the interface of `Executor`, as if it were a model that drafts a chain.

A row that brings a feature (that of the token before it) writes that token's keys and values to its
slot. The row of the text's last token then computes the whole block, and the row of a draft looks
up the logits of its place there. So a block costs one pass, however many drafts are taken of it,
and the tree of the likeliest drafts grows as with any drafter.

Rows of drafts write nothing, so the slots behind a text's last token are free: the keys and values
of its tokens lie side by side, and are read where they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.checkpoint.files import one_line
from engine.device import send
from engine.errors import kind_of
from engine.executor import Executor
from engine.forward.cache_tensors import zeros
from engine.forward.forward import Layers, Output
from engine.heads.dflash import DFlash
from engine.heads.layouts import rotations
from engine.heads.loaded import LoadedHead
from engine.layout.slots import Feed, LaneLayout, Move, copied

_DFlashPass = tuple[Sequence[Feed], Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class _Block:
    """What a head said behind a text.

    position  of the text's last token
    logits    [block - 1, V] float32: of each place behind it
    places    [block - 1, rank]: the places' vectors for the selector; None: there is none
    """

    position: int
    logits: torch.Tensor
    places: torch.Tensor | None


class DFlashExecutor(Executor):
    """Runs a DFlash head for `num_lanes` texts; features arrive in `Feed.features`.

    The logits of a row are zeros if its feature is None, or if its text never had a feature.
    """

    backend = "dflash"

    def __init__(self, loaded: LoadedHead, capacity: int, *, num_lanes: int = 1) -> None:
        """Allocate the cache for texts of at most `capacity` slots.

        Raises:
            ModelError: it does not fit into memory.
        """
        assert isinstance(loaded.module, DFlash)
        self.loaded, self._head = loaded, loaded.module
        self.capacity = capacity
        self.num_lanes_per_pass = num_lanes
        self.lanes = LaneLayout(num_lanes, capacity)
        # True for slots whose row had a feature: they hold its keys and values.
        self._are_held = np.zeros(self.lanes.total, dtype=np.bool_)
        self._said: dict[int, _Block] = {}  # by lane
        config = self._head.config
        shape = len(config.windows), 2, self.lanes.total, config.num_kv_heads, config.dim
        try:
            self._cache = zeros(shape, loaded.dtype, loaded.device)
            turns = rotations(config.rope, capacity + config.block, loaded.dtype)
            self._turns = turns.to(loaded.device)
        except (RuntimeError, ValueError) as error:
            raise kind_of(error)(
                f"{loaded.name}: no cache of {self.lanes.total} slots on {loaded.device} "
                f"({one_line(error)}); try a shorter maximum length"
            ) from error

    def lay_out(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> _DFlashPass:
        """Return the pass as it is: a block needs no layout."""
        assert 0 < len(feeds) <= self.num_lanes_per_pass
        return feeds, asks

    def forward(self, step: _DFlashPass, layers: Layers = ()) -> Output:
        """Return the logits of the rows that are asked for; `layers` must be ()."""
        assert not layers, "a head hands out no features"
        with torch.inference_mode():
            rows = [row for feed, ask in zip(*step, strict=True) for row in self._rows(feed, ask)]
        return Output(torch.stack(rows) if rows else self._nothing.expand(0, -1))

    def _rows(self, feed: Feed, ask: Sequence[int]) -> list[torch.Tensor]:
        """Write what a lane's features give; return the logits [V] of its rows in `ask`."""
        features = feed.features or (b"",) * len(feed.tokens)
        given = [row for row, feature in enumerate(features) if feature]
        self._write(feed, features, given)
        if given and ask:
            self._said[feed.lane] = self._block(feed, given[-1])
        return [self._row(feed, row, features[row]) for row in ask]

    def _write(self, feed: Feed, features: Sequence[bytes | None], given: Sequence[int]) -> None:
        """Write the keys and values of the tokens whose features came; note which slots hold any.

        A feature is that of the token before its row, and so is its position.
        """
        first, slots = self.lanes.first_slot(feed.lane), np.array(feed.slots)
        self._are_held[first + slots] = False
        if not given:
            return
        written = first + slots[list(given)]
        self._are_held[written] = True
        data = bytearray().join(filter(None, features))
        numbers = send(self.loaded.features_of(data, len(given)), self.loaded.device)
        at = send(torch.tensor([feed.positions[row] - 1 for row in given]), self.loaded.device)
        made = self._head.of_text(numbers, self._turns.index_select(1, at))
        where = send(torch.from_numpy(written), self.loaded.device)
        self._cache.index_copy_(2, where, made)

    def _block(self, feed: Feed, row: int) -> _Block:
        """Compute the block behind the token of a row, whose keys and values are written.

        It sees the tokens before that back to the first whose feature is missing.
        """
        position, first = feed.positions[row], self.lanes.first_slot(feed.lane)
        assert feed.slots[row] == position, "a token of the text lies at its position"
        missing = np.flatnonzero(~self._are_held[first : first + position])
        start = first + int(missing[-1]) + 1 if len(missing) else first
        seen = self._cache[:, :, start : first + position + 1]
        turns = self._turns[:, position : position + self._head.config.block]
        logits, states = self._head.block(feed.tokens[row], seen, turns)
        selector = self._head.selector
        return _Block(position, logits, None if selector is None else selector.place(states))

    def _row(self, feed: Feed, row: int, feature: bytes | None) -> torch.Tensor:
        """Return the logits [V] behind a row: those of its place in the block, or zeros."""
        said = self._said.get(feed.lane)
        if said is None or feature is None:
            return self._nothing
        place = min(max(0, feed.positions[row] - said.position), len(said.logits) - 1)
        if said.places is None or self._head.selector is None:
            return said.logits[place]
        return self._head.selector.weighed(said.logits[place], said.places[place], feed.tokens[row])

    @property
    def _nothing(self) -> torch.Tensor:
        """Return the logits [V] of a row without a prediction: zeros."""
        return torch.zeros(self.loaded.vocab_size, device=self.loaded.device)

    def move(self, *moves: Move) -> None:
        """Copy cache slots of all lanes (see `Executor.move`)."""
        read, written = np.array(copied(moves, self.lanes), dtype=np.int64)
        self._are_held[written] = self._are_held[read]
        sources, targets = send(torch.from_numpy(np.stack((read, written))), self.loaded.device)
        with torch.inference_mode():
            self._cache.index_copy_(2, targets, self._cache.index_select(2, sources))

    def copy_prefix(self, source_lane: int, target_lane: int, length: int) -> None:
        """Copy the first `length` slots of one lane to another, whose text begins alike."""
        assert source_lane != target_lane
        assert 0 < length <= self.capacity
        source, target = map(self.lanes.first_slot, (source_lane, target_lane))
        self._are_held[target : target + length] = self._are_held[source : source + length]
        self._said.pop(target_lane, None)
        with torch.inference_mode():
            there = self._cache.narrow(2, target, length)
            there.copy_(self._cache.narrow(2, source, length))

    def wipe(self, lane: int, start: int) -> None:
        """Write zeros to a lane's slots from `start` on, and forget what was said of its text."""
        first = self.lanes.first_slot(lane) + start
        self._said.pop(lane, None)
        self._are_held[first : first + self.capacity - start] = False
        with torch.inference_mode():
            self._cache.narrow(2, first, self.capacity - start).zero_()

    def warm_up(self, row_counts: Iterable[int]) -> dict[int, float]:
        """Return, for each number of rows, the seconds of a pass: always those of one block."""
        feed = Feed((0,), (1,), (1,), 0, (2,), features=(bytes(self.loaded.feature_bytes),))
        seconds = self.seconds_of(feed)
        self.forget()
        return dict.fromkeys(row_counts, seconds)

    def forget(self) -> None:
        """Mark all slots as empty; call it only while no text is open."""
        self._said.clear()
        self._are_held[:] = False

    def free(self) -> None:
        """Free the cache's memory; nothing can be run afterwards."""
        self._said.clear()
        del self._cache, self._turns
