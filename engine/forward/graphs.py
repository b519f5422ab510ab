"""The backend for GPUs: passes of the fused forward, captured as CUDA graphs of a few shapes.

A decode pass of a small model is a few hundred kernels of some microseconds each, and to launch one
takes the host as long. A graph launches all of them at once. It is a recording: the same kernels on
the same addresses. So a pass is filled up to one of a few numbers of lanes, rows and slots, its
integers are copied to where the recording reads them, and the mask is made of them on the device;
what the host does and sends does not grow with the context.

A shape is recorded when it first comes, at load for all that are common, and once more for passes
that hand out the hidden states that are said at load. Passes of other shapes, or for other hidden
states, run kernel by kernel, prefills among them. What a decode pass loses in that way is counted.

With a mask, each length needs a recording of its own. Where attention is split over the keys
(`flex_attention.py`), one serves all lengths: from how many slots on it does so is timed.
"""

from collections.abc import Sequence

import torch

from engine.checkpoint.files import one_line
from engine.checkpoint.model import LoadedModel
from engine.choice.coupling_on_gpu import Choice, capture_on
from engine.choice.logit_graphs import Captures, Compute, Record
from engine.device import send
from engine.errors import ModelError
from engine.forward.flex_attention import EVERY_LENGTH, SPLIT_DEVICES, Shape, Splits
from engine.forward.forward import Backend, Layers, Output, Spans
from engine.forward.fused import FusedBackend
from engine.forward.masks import from_words
from engine.layout.slots import LaneLayout, is_grid

FEWEST_SLOTS = 256
_NUM_WARM = 2  # runs before a recording: libraries allocate their workspaces in the first


class GraphBackend(Backend):
    """See `Backend`."""

    name = "graphs"
    is_captured = True

    def __init__(
        self,
        loaded: LoadedModel,
        lanes: LaneLayout,
        row_counts: Sequence[int],
        layers: Layers = (),
    ) -> None:
        """Record nothing yet.

        layers  whose hidden states recordings hand out

        Raises ModelError if this backend does not cover the model or its device.
        """
        self._record = self._recorder(loaded.device)
        self._fused = FusedBackend(loaded, lanes)
        self._name = loaded.name
        self._rank = loaded.rank
        self._device = loaded.device
        self._dtype = loaded.dtype
        self.cache = self._fused.cache
        self.row_counts = tuple(row_counts)
        # The int: visible slots, or EVERY_LENGTH where attention is split over the keys.
        self._recorded: dict[tuple[Spans, int, Layers], Compute] = {}
        self._layers = layers
        # Where all recordings leave them: no recording uses it as scratch.
        most_rows = lanes.count * max(self.row_counts, default=0)
        self._features = self._fused.empty_features(most_rows, layers)
        self._chains: dict[tuple[int, Spans, int, Choice], Compute] = {}  # the first: steps
        self._lanes = lanes
        self._splits: Splits | None = None  # None: every pass has a mask

    def take_over(self, *, timed: bool = True) -> None:
        """See `Backend.take_over`. What was recorded reads weights that are no more."""
        self._recorded.clear()
        self._chains.clear()
        # A pool whose graphs have gone is not used again.
        self._record = self._recorder(self._device)
        self._fused.take_over(timed=timed)
        # How keys are shared out depends on how many there are, and so do a row's last bits. Ranks
        # would choose by clocks of their own, and meet in different recordings.
        is_timed = timed and self._rank is None
        if is_timed and self.row_counts and self._device.type in SPLIT_DEVICES:
            with torch.inference_mode():
                self._splits = Splits(
                    self._fused.make_split, self._captured, self._lanes, self.row_counts
                )
            # Those with a mask were for comparison; the executor's `warm_up` makes what is needed.
            self._recorded = {
                key: recorded
                for key, recorded in self._recorded.items()
                if key[1] == EVERY_LENGTH and _shape(key[0]) in self._splits.least
            }

    def forward(
        self,
        rows: torch.Tensor,
        spans: Spans,
        *,
        num_visible: int,
        keep: torch.Tensor | None = None,
        layers: Layers = (),
    ) -> Output:
        """See `Backend.forward`."""
        with torch.inference_mode():
            is_shape = keep is None and all(span.num_rows in self.row_counts for span in spans)
            if not is_shape or layers not in ((), self._layers):
                self.num_uncaptured += is_shape and not self.is_loading
                return self._compute(send(rows, self._device), spans, num_visible, keep, layers)
            length = self._length(rows, spans, num_visible)
            # A recording writes where it always writes, and other recordings may write there too.
            logits = self._captured(rows, spans, length, layers)(rows).clone()
            return Output(logits, self._features[: rows.shape[1]] if layers else None)

    def _length(self, rows: torch.Tensor, spans: Spans, num_visible: int) -> int:
        """EVERY_LENGTH where attention is split over the keys, else the visible slots."""
        if self._splits is None or not is_grid(spans):
            return num_visible
        return EVERY_LENGTH if self._splits.is_split(rows, spans, num_visible) else num_visible

    def _captured(
        self, rows: torch.Tensor, spans: Spans, num_visible: int, layers: Layers = ()
    ) -> Compute:
        """Return the recording of passes of this shape, which is made if there is none."""
        key = spans, num_visible, layers
        if key not in self._recorded:
            self._recorded[key] = self._recording(rows, *key)
        return self._recorded[key]

    @staticmethod
    def _recorder(device: torch.device) -> Record:
        record = recorder(device)
        capture_on(device, Captures(record))
        return record

    def chain(
        self, steps: torch.Tensor, spans: Spans, *, num_visible: int, choice: Choice
    ) -> torch.Tensor:
        """See `Backend.chain`: the steps are one recording, and no token of them is waited for."""
        with torch.inference_mode():
            length = self._length(steps, spans, num_visible)
            key = steps.shape[1] - 1, spans, length, choice
            if key not in self._chains:
                self._chains[key] = self._chain(steps, spans, length, choice)
            return self._chains[key](steps)

    def _chain(
        self, steps: torch.Tensor, spans: Spans, num_visible: int, choice: Choice
    ) -> Compute:
        def compute(there: torch.Tensor) -> torch.Tensor:
            return self._steps(there, spans, num_visible, choice)

        try:
            return self._record(compute, steps)
        except RuntimeError:
            return lambda steps: compute(send(steps, self._device))

    def _steps(
        self, steps: torch.Tensor, spans: Spans, num_visible: int, choice: Choice
    ) -> torch.Tensor:
        ids, rest, keys = steps[:1, :1], steps[1:5], steps[5]
        found = []
        for index in range(steps.shape[1] - 1):
            row = torch.cat((ids, rest[:, index : index + 1]))
            logits = self._compute(row, spans, num_visible).logits.float()
            found.append(choice.of(logits, torch.cat((keys[index : index + 1], keys[-1:]))))
            ids = found[-1][:, :1].long()
        return torch.cat(found)

    def _recording(
        self, rows: torch.Tensor, spans: Spans, num_visible: int, layers: Layers
    ) -> Compute:
        self.num_uncaptured += not self.is_loading
        features = self._features[: rows.shape[1]]

        def compute(there: torch.Tensor) -> torch.Tensor:
            out = self._compute(there, spans, num_visible, layers=layers)
            if out.features is not None:
                features.copy_(out.features)
            return out.logits

        try:
            return self._record(compute, rows)
        except RuntimeError as error:
            if not self.is_loading:
                return self._unrecorded(compute)
            raise ModelError(
                f"{self._name}: a pass of {rows.shape[1]} rows cannot be captured as a CUDA graph "
                f"({one_line(error)}); use the backend fused"
            ) from error

    def _unrecorded(self, compute: Compute) -> Compute:
        """What takes the place of a recording that failed in the middle of a text."""

        def run(rows: torch.Tensor) -> torch.Tensor:
            self.num_uncaptured += 1
            return compute(send(rows, self._device))

        return run

    def _compute(
        self,
        rows: torch.Tensor,
        spans: Spans,
        num_visible: int,
        keep: torch.Tensor | None = None,
        layers: Layers = (),
    ) -> Output:
        split = num_visible == EVERY_LENGTH
        mask = None if split else from_words(rows[3:], num_visible, self._dtype)
        return self._fused.compute(rows, spans, mask, keep, layers)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Backend.move`."""
        self._fused.move(sources, targets)

    def copy(self, source: int, target: int, length: int) -> None:
        """See `Backend.copy`."""
        self._fused.copy(source, target, length)

    def wipe(self, first: int, length: int) -> None:
        """See `Backend.wipe`."""
        self._fused.wipe(first, length)

    def not_finite(self, first: int, length: int) -> int | None:
        """See `Backend.not_finite`."""
        return self._fused.not_finite(first, length)


def _shape(spans: Spans) -> Shape:
    return len(spans), spans[0].num_rows


def captured_len(needed: int) -> int:
    """Return how many slots a pass covers that needs so many: 256, 384, 512, 768, 1024, ...

    At most a third of them for nothing, and a text of 32,000 tokens sees fifteen sizes.
    """
    size = FEWEST_SLOTS
    while size < needed:
        is_power = size & (size - 1) == 0
        size = size * 3 // 2 if is_power else size * 4 // 3
    return size


def recorder(device: torch.device) -> Record:
    """Return what records CUDA graphs on `device`, all in one pool of memory.

    Raises ModelError if it is no GPU.
    """
    if device.type != "cuda":
        raise ModelError("CUDA graphs need a GPU; use the backend fused, or compiled")
    pool = torch.cuda.graph_pool_handle()
    # One for all: the libraries keep a workspace (cuBLAS: 32 MiB) for each stream they have met.
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(compute: Compute, rows: torch.Tensor) -> Compute:
        staging = rows.clone().pin_memory()
        there = staging.to(device)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(device)
        try:
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                for _ in range(_NUM_WARM):
                    compute(there)
            # Other threads of the process may do what a capture of this one must not.
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                result = compute(there)
        finally:
            # A capture that raises leaves the process on its stream.
            torch.cuda.set_stream(stream)
            stream.wait_stream(side)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

        def replay(rows: torch.Tensor) -> torch.Tensor:
            copied.synchronize()  # or what the last pass copies might be overwritten
            staging.copy_(rows)
            there.copy_(staging, non_blocking=True)
            copied.record()
            graph.replay()
            return result

        return replay

    return record
