"""The executor of a synthetic model: its cache holds in each slot the path of the token there.

A path is a hash of all tokens up to that one (`model.py`). A row finds the path of its text in the
slot of the token before it, as a model finds keys and values. So a node that confuses slots writes
another text, which the checks find.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from engine.executor import Executor
from engine.forward.forward import Layers, Output
from engine.heads.loaded import Loaded
from engine.layout.slots import NUM_TREE_SLOTS, Feed, LaneLayout, Move
from engine.loading import Engine
from lab.synthetic.model import START, VOCAB_SIZE, after

LAUNCH_S = 0.0001  # seconds that a launch keeps the host busy, as the kernels of a forward do
MAX_LEN = 1 << 14
NUM_LANES = 4


class SyntheticExecutor(Executor):
    """Runs passes of a synthetic model: `forward` returns paths instead of logits.

    launch_s  seconds for which `forward` keeps this CPU core busy
    """

    backend = "synthetic"

    def __init__(
        self,
        capacity: int = MAX_LEN + NUM_TREE_SLOTS,
        num_lanes: int = NUM_LANES,
        *,
        launch_s: float = LAUNCH_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.capacity = capacity
        self.lanes = LaneLayout(num_lanes, capacity)
        self.num_lanes_per_pass = num_lanes
        self._launch_s = launch_s
        self._clock = clock
        # One slot more (index -1) holds the path of the empty text, which precedes the first token.
        self._paths = [[START] * (capacity + 1) for _ in range(num_lanes)]

    def lay_out(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> list[int]:
        """Write the rows' paths into the cache; return the paths of the rows that are asked for."""
        asked: list[int] = []
        for feed, ask in zip(feeds, asks, strict=True):
            paths, made = self._paths[feed.lane], []
            for token, slot, before in zip(feed.tokens, feed.slots, feed.before, strict=True):
                paths[slot] = path = after(paths[before], token)
                made.append(path)
            asked += [made[row] for row in ask]
        return asked

    def forward(self, step: list[int], layers: Layers = ()) -> Output:
        """Keep the host busy for `launch_s`; return the paths in the place of logits."""
        assert not layers, "a synthetic model has no features"
        end = self._clock() + self._launch_s
        while self._clock() < end:
            pass
        return Output(cast(torch.Tensor, step))

    def move(self, *moves: Move) -> None:
        """Copy slots; all are read before any is written."""
        for move in moves:
            paths = self._paths[move.lane]
            moved = [paths[slot] for slot in move.sources]
            for slot, path in zip(move.targets, moved, strict=True):
                paths[slot] = path

    def copy_prefix(self, source_lane: int, target_lane: int, length: int) -> None:
        """Copy the first `length` slots of a lane (the cache of one text) to another lane."""
        self._paths[target_lane][:length] = self._paths[source_lane][:length]

    def wipe(self, lane: int, start: int) -> None:
        """Clear all slots of a lane from `start` on."""
        self._paths[lane][start:] = [START] * (len(self._paths[lane]) - start)


def engine_of(folder: Path) -> Engine:
    """Return a loaded engine with a synthetic model."""
    loaded = SimpleNamespace(
        name=str(folder),
        device=torch.device("cpu"),
        dtype=torch.float32,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_LEN,
        eos_token_ids=(),
        num_parameters=0,
        hidden_size=1,
        num_layers=1,
    )
    return Engine(
        executor=SyntheticExecutor(),
        loaded=cast(Loaded, cast(Any, loaded)),
        max_len=MAX_LEN,
        vocab_size=VOCAB_SIZE,
        digests=("", ""),
        load_s=0.0,
        # The simulated device takes longer, and nodes use the larger of the two times.
        pass_s=dict.fromkeys((1, 2, 3, 4, 5, 8, 9, 16), LAUNCH_S),
        device="synthetic",
    )
