"""The backend for GPUs: passes of the fused forward, captured as CUDA graphs of a few shapes.

A decode pass of a small model is a few hundred kernels of some microseconds each, and to launch one
takes the host as long. A graph launches all of them at once. It is a recording: the same kernels on
the same addresses. So a pass is filled up to one of a few numbers of lanes, rows and slots, its
integers are copied to where the recording reads them, and the mask is made of them on the device;
what the host does and sends does not grow with the context.

A shape is recorded when it first comes, at load for all that are common. Passes of other shapes run
kernel by kernel, prefills among them. What a decode pass loses in that way is counted.

With a mask, each length needs a recording of its own. Where attention is split over the keys
(`flex_attention.py`), one serves all lengths: from how many slots on it does so is timed at load.
"""

import math
from collections.abc import Sequence

import torch

from engine.captures import Captures, Compute, Record
from engine.device import send
from engine.device_choice import Choice, capture_on
from engine.errors import ModelError
from engine.flex_attention import SPLIT_DEVICES, Shape
from engine.flex_choice import EVERY_LENGTH, find_splits
from engine.forward import Backend, Output, Spans, no_hidden
from engine.fused import FusedBackend
from engine.lanes import Lanes, is_grid
from engine.masks import from_words
from engine.model import LoadedModel
from engine.model_files import one_line

FEWEST_SLOTS = 256
_NUM_WARM = 2  # runs before a recording: libraries allocate their workspaces in the first


class GraphBackend(Backend):
    """See `Backend`."""

    name = "graphs"
    is_captured = True

    def __init__(self, loaded: LoadedModel, lanes: Lanes, row_counts: Sequence[int]) -> None:
        """Raises ModelError if this backend does not cover the model or its device."""
        self._record = self._recorder(loaded.device)
        self._fused = FusedBackend(loaded, lanes)
        self._name = loaded.name
        self._rank = loaded.rank
        self._device = loaded.device
        self._dtype = loaded.dtype
        self.cache = self._fused.cache
        self.row_counts = tuple(row_counts)
        # The int: visible slots, or EVERY_LENGTH where attention is split over the keys.
        self._recorded: dict[tuple[Spans, int], Compute] = {}
        self._chains: dict[tuple[int, Spans, int, Choice], Compute] = {}  # the first: steps
        self._lanes = lanes
        self._split_from: dict[Shape, int] = {}  # visible slots

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
                self._split_from = find_splits(
                    self._fused.make_split, self._captured, self._lanes, self.row_counts
                )
            # Those with a mask were for comparison; `Executor.warm_up` comes to what is needed.
            self._recorded = {
                (spans, length): recorded
                for (spans, length), recorded in self._recorded.items()
                if length == EVERY_LENGTH and _shape(spans) in self._split_from
            }

    def forward(
        self,
        rows: torch.Tensor,
        spans: Spans,
        *,
        num_visible: int,
        keep: torch.Tensor | None = None,
        with_hidden: bool = False,
    ) -> Output:
        """See `Backend.forward`."""
        if with_hidden:
            raise no_hidden(self._name, self.name)
        with torch.inference_mode():
            if keep is not None or any(span.num_rows not in self.row_counts for span in spans):
                return Output(self._compute(send(rows, self._device), spans, num_visible, keep))
            length = self._length(spans, num_visible)
            # A recording writes where it always writes, and other recordings may write there too.
            return Output(self._captured(rows, spans, length)(rows).clone())

    def _length(self, spans: Spans, num_visible: int) -> int:
        """EVERY_LENGTH where attention is split over the keys, else the visible slots."""
        is_split = is_grid(spans) and num_visible >= self._split_from.get(_shape(spans), math.inf)
        return EVERY_LENGTH if is_split else num_visible

    def _captured(self, rows: torch.Tensor, spans: Spans, num_visible: int) -> Compute:
        """Return the recording of passes of this shape, which is made if there is none."""
        shape = spans, num_visible
        if shape not in self._recorded:
            self._recorded[shape] = self._recording(rows, *shape)
        return self._recorded[shape]

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
            length = self._length(spans, num_visible)
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
            logits = self._compute(row, spans, num_visible).float()
            found.append(choice.of(logits, torch.cat((keys[index : index + 1], keys[-1:]))))
            ids = found[-1][:, :1].long()
        return torch.cat(found)

    def _recording(self, rows: torch.Tensor, spans: Spans, num_visible: int) -> Compute:
        self.num_uncaptured += not self.is_loading
        try:
            return self._record(lambda there: self._compute(there, spans, num_visible), rows)
        except RuntimeError as error:
            if not self.is_loading:
                return self._unrecorded(spans, num_visible)
            raise ModelError(
                f"{self._name}: a pass of {rows.shape[1]} rows cannot be captured as a CUDA graph "
                f"({one_line(error)}); use the backend fused"
            ) from error

    def _unrecorded(self, spans: Spans, num_visible: int) -> Compute:
        """What takes the place of a recording that failed in the middle of a text."""

        def compute(rows: torch.Tensor) -> torch.Tensor:
            self.num_uncaptured += 1
            return self._compute(send(rows, self._device), spans, num_visible)

        return compute

    def _compute(
        self,
        rows: torch.Tensor,
        spans: Spans,
        num_visible: int,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        split = num_visible == EVERY_LENGTH
        mask = None if split else from_words(rows[3:], num_visible, self._dtype)
        return self._fused.compute(rows, spans, mask, keep).logits

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Backend.move`."""
        self._fused.move(sources, targets)

    def copy(self, source: int, target: int, length: int) -> None:
        """See `Backend.copy`."""
        self._fused.copy(source, target, length)


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
