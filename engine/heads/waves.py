"""Which rows of a pass of an EAGLE head can run together, and which not at all.

A row needs the feature before it: the target's, where that is given, or else the state that the
head has computed for the row before. If that row is in the same pass, it has to run first. So a
pass is a sequence of *waves*; nearly always there is one. A row without either is *absent*: it is
not computed, its slot holds nothing, and nobody ever sees it. Absent is also what follows an absent
row without a feature of its own, and a text's first token, before which there is nothing.

Owns which slots hold something. Touches no tensor of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.filling import rows_of
from engine.lanes import Lanes, Span
from engine.slots import Feed

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

    def __init__(self, lanes: Lanes) -> None:
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
