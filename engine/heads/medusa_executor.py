"""Run Medusa heads behind the interface of `Executor`, as if they were a model.

The heads' predictions depend on one feature (hidden state of the target) alone, that of the token
before the text's last one: head 0 predicts the token after the last one, head 1 the token after
that, and so on. So the row of the last token computes the logits of all heads, and the row of a
draft looks up those of the head for its depth. The tree of the likeliest drafts grows as with any
drafter, for the price of one step.
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
    """Runs Medusa heads for `num_lanes` texts; features arrive in `Feed.features`.

    The logits of a row are zeros if its feature is None, or if its text never had a feature. There
    is no KV cache, so there is nothing to move or copy.
    """

    backend = "medusa"

    def __init__(self, loaded: LoadedHead, capacity: int, *, num_lanes: int = 1) -> None:
        assert isinstance(loaded.module, Medusa)
        self.loaded, self._heads = loaded, loaded.module
        self.capacity = capacity
        self.num_lanes_per_pass = num_lanes
        self.lanes = LaneLayout(num_lanes, capacity)
        # Per lane: the position of the last row that had a feature, and its logits [num_heads, V].
        self._said: dict[int, tuple[int, torch.Tensor]] = {}

    def lay_out(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> _MedusaPass:
        """Return the pass as it is: Medusa heads need no layout."""
        assert 0 < len(feeds) <= self.num_lanes_per_pass
        return feeds, asks

    def forward(self, step: _MedusaPass, layers: Layers = ()) -> Output:
        """Return the logits of the rows that are asked for; `layers` must be ()."""
        assert not layers, "a head hands out no features"
        rows = [row for feed, ask in zip(*step, strict=True) for row in self._rows(feed, ask)]
        return Output(torch.stack(rows) if rows else self._nothing.expand(0, -1))

    def _rows(self, feed: Feed, ask: Sequence[int]) -> list[torch.Tensor]:
        """Return the logits [V] of a lane's rows in `ask`; keep those of its last feature."""
        features = feed.features or (b"",) * len(feed.tokens)
        given = [row for row, feature in enumerate(features) if feature]
        if given and ask:
            row = given[-1]
            feature = features[row]
            assert feature is not None
            self._said[feed.lane] = feed.positions[row], self._logits(feature)
        return [self._row(feed, row, features[row]) for row in ask]

    def _row(self, feed: Feed, row: int, feature: bytes | None) -> torch.Tensor:
        """Return the logits [V] of one row: those of the head for its depth, or zeros."""
        if feed.lane not in self._said or feature is None:
            return self._nothing
        first, logits = self._said[feed.lane]
        return logits[min(max(0, feed.positions[row] - first), len(logits) - 1)]

    def _logits(self, feature: bytes) -> torch.Tensor:
        """Return the logits of all heads for one feature, [num_heads, V]."""
        features = self.loaded.features_of(feature, 1)
        return self._heads.logits(send(features, self.loaded.device))[:, 0]

    @property
    def _nothing(self) -> torch.Tensor:
        """Return the logits [V] of a row without a prediction: zeros."""
        return torch.zeros(self.loaded.vocab_size, device=self.loaded.device)

    def move(self, *moves: Move) -> None:
        """Do nothing: there is no cache."""

    def copy_prefix(self, source_lane: int, target_lane: int, length: int) -> None:
        """Do nothing: there is no cache."""

    def wipe(self, lane: int, start: int) -> None:
        """Forget the logits kept for the text of a lane."""
        del start
        self._said.pop(lane, None)

    def warm_up(self, row_counts: Iterable[int]) -> dict[int, float]:
        """Return, for each number of rows, the seconds of a pass: always those of one feature."""
        feed = Feed((0,), (1,), (1,), 0, (2,), features=(bytes(self.loaded.feature_bytes),))
        seconds = self.seconds_of(feed)
        self.forget()
        return dict.fromkeys(row_counts, seconds)

    def forget(self) -> None:
        """Forget the logits kept for all texts; call it only while no text is open."""
        self._said.clear()

    def free(self) -> None:
        """Forget the logits kept for all texts."""
        self._said.clear()
