"""Run Medusa heads as if they were a model that is asked row by row: `Executor`'s surface.

What the heads say depends on one feature alone, the one before the text's last token: head 0 says
what follows that token, head 1 what follows whatever comes next, and so on. So the row of the last
token computes all of them, and the rows of drafts behind it look up the head of their depth: a tree
of the likeliest products grows as with any drafter, for the price of one step.
"""

from collections.abc import Iterable, Sequence

import torch

from engine.device import send
from engine.executor import Executor
from engine.forward.forward import Layers, Output
from engine.heads.loaded import LoadedHead
from engine.heads.medusa import Medusa
from engine.layout.slots import Feed, LaneLayout, Move

_MedusaPass = tuple[Sequence[Feed], Sequence[Sequence[int]]]


class MedusaExecutor(Executor):
    """Medusa heads for `num_lanes` texts. A row is given its feature by `Feed.features`.

    What is said of rows without any is zeros. There is no cache, so there is nothing to move.
    """

    backend = "medusa"

    def __init__(self, loaded: LoadedHead, capacity: int, *, num_lanes: int = 1) -> None:
        assert isinstance(loaded.module, Medusa)
        self.loaded, self._heads = loaded, loaded.module
        self.capacity = capacity
        self.num_lanes_per_pass = num_lanes
        self.lanes = LaneLayout(num_lanes, capacity)
        # By lane: the position of the row that was given a feature last, and the logits of it.
        self._said: dict[int, tuple[int, torch.Tensor]] = {}

    def lay_out(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> _MedusaPass:
        """The first half of a pass: there is nothing to lay out."""
        assert 0 < len(feeds) <= self.num_lanes_per_pass
        return feeds, asks

    def forward(self, step: _MedusaPass, layers: Layers = ()) -> Output:
        """The second half: the heads. Nobody may ask them for features."""
        assert not layers, "a head hands out no features"
        rows = [row for feed, ask in zip(*step, strict=True) for row in self._rows(feed, ask)]
        return Output(torch.stack(rows) if rows else self._nothing.expand(0, -1))

    def _rows(self, feed: Feed, ask: Sequence[int]) -> list[torch.Tensor]:
        """The logits [V] of the rows of one lane that are asked for."""
        features = feed.features or (b"",) * len(feed.tokens)
        given = [row for row, feature in enumerate(features) if feature]
        if given and ask:
            row = given[-1]
            feature = features[row]
            assert feature is not None
            self._said[feed.lane] = feed.positions[row], self._logits(feature)
        return [self._row(feed, row, features[row]) for row in ask]

    def _row(self, feed: Feed, row: int, feature: bytes | None) -> torch.Tensor:
        if feed.lane not in self._said or feature is None:
            return self._nothing
        first, logits = self._said[feed.lane]
        return logits[min(max(0, feed.positions[row] - first), len(logits) - 1)]

    def _logits(self, feature: bytes) -> torch.Tensor:
        """What all heads say of a feature, [num_heads, V]."""
        features = self.loaded.features_of(feature, 1)
        return self._heads.logits(send(features, self.loaded.device))[:, 0]

    @property
    def _nothing(self) -> torch.Tensor:
        return torch.zeros(self.loaded.vocab_size, device=self.loaded.device)

    def move(self, *moves: Move) -> None:
        """There is no cache."""

    def copy_prefix(self, source_lane: int, target_lane: int, length: int) -> None:
        """Likewise."""

    def wipe(self, lane: int, start: int) -> None:
        """Forget what was said of a text."""
        del start
        self._said.pop(lane, None)

    def warm_up(self, row_counts: Iterable[int]) -> dict[int, float]:
        """Return the seconds of the row that is given a feature, for each number of rows."""
        feed = Feed((0,), (1,), (1,), 0, (2,), features=(bytes(self.loaded.feature_bytes),))
        seconds = self.seconds_of(feed)
        self.forget()
        return dict.fromkeys(row_counts, seconds)

    def forget(self) -> None:
        """Nothing has been said; only between sessions."""
        self._said.clear()

    def free(self) -> None:
        """Forget what was said."""
        self._said.clear()
