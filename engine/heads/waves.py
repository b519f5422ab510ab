"""Which rows of an EAGLE head's pass can run together, and which cannot run at all.

A row needs the hidden state of the token before it: the target's feature if that is given, else
the state that the head computed for the row before. If that row is in the same pass, it must run
first. So a pass is a sequence of *waves* (rows that run together); nearly always there is one. A
row with neither is *absent*: it is not computed, its slot holds nothing, and no row sees it. A
text's first token is absent (there is no token before it), and so is a row without a given
feature that follows an absent row.

Of a head of several layers in a row (MTP), layer k reads the state that layer k - 1 has computed
for the row before, and the last layer its own where that is all there is. So each row has the
layers that it can run.

Owns which slots hold anything. Touches no tensor of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.forward.forward import rows_of
from engine.layout.slots import Feed, LaneLayout, Span

Integers = npt.NDArray[np.int64]

ABSENT = -1  # wave number of an absent row
MOST_LAYERS = 8  # of a head, in a row


@dataclass(frozen=True, slots=True)
class Wave:
    """Rows of a pass that run together, lane by lane.

    rows      [5, n] int64 as in `Backend.forward`
    spans     the lanes of the rows
    before    [n] int64: per row, the slot of the whole cache with the row before it
    given     indices of the rows that have a given feature
    features  bytes of those features, concatenated; of a prompt's chunk up to 50 MB, so copied once
    wanted    indices of the rows whose logits are wanted
    places    for each of these, its index among all logits that the pass returns
    layers    per row, the layers that it runs, as bits; 1 for a head of one layer
    sources   per row, the layer whose state of the row before its last layer reads
    """

    rows: Integers
    spans: tuple[Span, ...]
    before: Integers
    given: Sequence[int]
    features: bytes | bytearray
    wanted: Sequence[int]
    places: Sequence[int]
    layers: Sequence[int] = ()
    sources: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Laid:
    """One text's rows of a pass as integers, and the wave of each.

    first_slot   where its lane begins in the whole cache
    rows         [5, n] int64 as in `Backend.forward`
    waves        per row, the number of its wave, or ABSENT
    layers, sources  per row, as in `Wave`; 0 layers if it is absent
    ask          indices of the rows whose logits are wanted
    first_place  index of their first logits among all that the pass returns
    """

    feed: Feed
    first_slot: int
    rows: Integers
    waves: Sequence[int]
    layers: Sequence[int]
    sources: Sequence[int]
    ask: Sequence[int]
    first_place: int


class Slots:
    """Tracks which slots of the cache hold a computed row, and divides passes into waves.

    are_held  [slots of all lanes] bool: True if the slot holds a row that was not absent; of a head
              of several layers `layers` says of which layers
    layers    [slots of all lanes] uint8: the layers of which the slot holds a row, as bits
    """

    def __init__(self, lanes: LaneLayout, num_layers: int = 1) -> None:
        assert 0 < num_layers <= MOST_LAYERS
        self._lanes, self._last = lanes, num_layers - 1
        self.layers = np.zeros(lanes.total, dtype=np.uint8)
        self.are_held = self.layers.view(np.bool_)

    def waves(
        self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]
    ) -> tuple[list[Wave], Integers, Integers]:
        """Divide a pass into waves; return (waves, slots newly held, slots no longer held).

        Also records which slots will hold a row, so the pass must be run before another is laid
        out. Slots are indices into the whole cache, int64; those of layer k come behind all of
        layer k - 1.

        feeds  rows of different lanes
        asks   per feed, the indices of the rows whose logits are wanted
        """
        if len(feeds) == 1 and len(feeds[0].tokens) == 1:
            return self._only_row(feeds[0], len(asks[0]))
        laid, place = [], 0
        for feed, ask in zip(feeds, asks, strict=True):
            first_slot = self._lanes.first_slot(feed.lane)
            rows = rows_of(feed, first_slot)
            laid.append(
                _Laid(feed, first_slot, rows, *self._waves_of(feed, first_slot), ask, place)
            )
            place += len(ask)
        laid.sort(key=lambda one: one.first_slot)
        written = np.concatenate([one.rows[2] for one in laid])
        held, empty = self._change(written, np.concatenate([one.layers for one in laid]))
        last = max(max(one.waves) for one in laid)
        return [_wave(laid, number) for number in range(last + 1)], held, empty

    def _change(self, written: Integers, layers: npt.NDArray[Any]) -> tuple[Integers, Integers]:
        """Record which layers slots hold; return (newly held, no longer held) as `waves` does."""
        before, layers = self.layers[written], layers.astype(np.uint8)
        self.layers[written] = layers
        gained, lost = layers & ~before, before & ~layers
        if self._last == 0:
            return written[gained != 0], written[lost != 0]
        total, numbers = len(self.layers), range(self._last + 1)
        held, empty = (
            np.concatenate([written[changed >> k & 1 != 0] + k * total for k in numbers])
            for changed in (gained, lost)
        )
        return held, empty

    def _runs(self, before: int, *, is_given: bool) -> int:
        """Return the layers that a row runs, as bits; `before`: those of the row before it."""
        if is_given:
            return 1 | (before << 1) & (2 << self._last) - 1
        return (before << 1) & (2 << self._last) - 1 | before & 1 << self._last

    def _source(self, before: int) -> int:
        """Return the layer whose state of the row before the last layer reads."""
        return self._last - 1 if self._last and before >> self._last - 1 & 1 else self._last

    def _only_row(self, feed: Feed, num_asked: int) -> tuple[list[Wave], Integers, Integers]:
        """Note a pass of one row; return what `waves` returns: a shortcut that saves host time."""
        first_slot, (slot,), (before,) = self._lanes.first_slot(feed.lane), feed.slots, feed.before
        given = feed.features[0] if feed.features else b""
        held = int(self.layers[first_slot + before]) if before >= 0 else 0
        is_absent = before < 0 or given is None
        layers = 0 if is_absent else self._runs(held, is_given=bool(given))
        written = np.array((first_slot + slot,))
        changed = self._change(written, np.array((layers,)))
        if not layers:
            return [], *changed
        wave = Wave(
            rows=rows_of(feed, first_slot),
            spans=(Span(first_slot, 1),),
            before=np.array((first_slot + before,)),
            given=(0,) if given else (),
            features=given or b"",
            wanted=(0,) * num_asked,
            places=range(num_asked),
            layers=(layers,),
            sources=(self._source(held),),
        )
        return [wave], *changed

    def _waves_of(self, feed: Feed, first_slot: int) -> tuple[list[int], list[int], list[int]]:
        """Return of each row the number of its wave, or ABSENT, its layers and its source.

        A row sees its ancestors, so it never runs before them; if it needs the state of its parent
        it runs in a later wave.
        """
        waves, runs, sources = list[int](), list[int](), list[int]()
        of_slot: dict[int, tuple[int, int]] = {}  # slot -> wave of its row, layers that it runs
        features = feed.features or (b"",) * len(feed.tokens)
        for slot, before, given in zip(feed.slots, feed.before, features, strict=True):
            above = of_slot.get(before)
            if above is None:
                earliest, held = 0, int(self.layers[first_slot + before]) if before >= 0 else 0
            else:
                earliest, held = above
            is_unknown = before < 0 or given is None
            layers = 0 if is_unknown else self._runs(held, is_given=bool(given))
            if above is not None and layers and not given:
                earliest += 1
            of_slot[slot] = earliest, layers
            waves.append(earliest if layers else ABSENT)
            runs.append(layers)
            sources.append(self._source(held))
        return waves, runs, sources

    def move(self, read: Integers, written: Integers) -> None:
        """Record that slots `read` were copied to `written`, all reads before any write."""
        self.layers[written] = self.layers[read]


def _wave(laid: Sequence[_Laid], number: int) -> Wave:
    """Return wave `number` of a pass: its rows of all lanes, lane by lane."""
    parts: list[Integers] = []
    spans: list[Span] = []
    before: list[int] = []
    given: list[int] = []
    features: list[bytes] = []
    wanted: list[int] = []
    places: list[int] = []
    layers: list[int] = []
    sources: list[int] = []
    for one in laid:
        rows = [row for row, wave in enumerate(one.waves) if wave == number]
        if not rows:
            continue
        start = len(before)
        where = {row: start + i for i, row in enumerate(rows)}
        for row in rows:
            feature = one.feed.features[row] if one.feed.features else b""
            before.append(one.first_slot + one.feed.before[row])
            layers.append(one.layers[row])
            sources.append(one.sources[row])
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
        features=bytearray().join(features),
        wanted=wanted,
        places=places,
        layers=layers,
        sources=sources,
    )
