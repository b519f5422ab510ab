"""The backend for GPUs: passes of another backend, recorded as CUDA graphs of a few shapes.

A decode pass of a small model is a few hundred kernels of some microseconds each, and launching one
takes the host as long. A CUDA graph launches all of them at once. It is a recording: the same
kernels on the same addresses. So a pass is padded to one of a few numbers of lanes, rows and slots,
its integers are copied to the address where the recording reads them, and the mask is computed from
them on the device. What the host does and sends does not grow with the context. Where the lanes
begin is computed on the device too, from the slots that the rows are written to, so a recording
serves any lanes.

Everything is recorded at load: passes of each shape at each length, and chains of steps. They
return the hidden states named at load, whether these are wanted or not. Nothing is recorded later,
because a text would wait for it; if it happens all the same, it is counted and logged. Passes of
other shapes or for other hidden states, prefills among them, run kernel by kernel; decode passes
that do so are counted. So do passes of a shape whose recording failed at load, for lack of memory
perhaps, after the weights were repacked, when no other backend can take this one's place. A
reproducible model is refused instead: the last bits of such passes were not checked.

With a mask, each length needs its own recording, and if there are several lanes, the keys and
values of a pass's lanes are first copied together. If attention is split over the keys
(`split_attention.py`), one recording serves all lengths, and nothing is copied; from how many slots
on that is faster is timed at load.

The small operators of a layer are merged into few kernels (`small_operators.py`) if a recording
with them is right and faster, which is tried at load.

The backend that is recorded is the fused forward if it can run the model, else transformers' own
over the slot cache. The latter always uses a mask, and lanes are its batch dimension. Whether a
family's modules can be recorded is tested before anything is recorded: code that makes the host
wait for a number (such as a loop over the experts that were chosen) raises an error in that test.

The memory that a recording writes to is never freed as long as it exists: rooms
(`lane_attention.py`), one buffer for the logits of all passes, and one for their features. Logits
are float32 and stay there until the next pass, so that a recorded choice can read them in place.
"""

import logging
import math
import weakref
from collections.abc import Hashable, Sequence
from functools import partial

import torch

from engine.checkpoint.files import one_line
from engine.checkpoint.model import LoadedModel
from engine.choice.coupling_on_gpu import NUM_SETTINGS, Choice, capture_on
from engine.choice.logit_graphs import Captures, Compute, Record
from engine.device import Inbox, refusing_to_wait, send
from engine.errors import ModelError, OutOfMemory, RankError, kind_of, lacks_memory
from engine.forward.flex_attention import (
    EVERY_LENGTH,
    SPLIT_DEVICES,
    chains,
    find_splits,
    run_to_end,
)
from engine.forward.forward import (
    Backend,
    HuggingFaceBackend,
    Layers,
    Output,
    Recordable,
    Say,
    Shape,
    Spans,
    silent,
)
from engine.forward.fused import FusedBackend
from engine.forward.llama_parts import why_not_fused
from engine.forward.masks import from_words, words_of
from engine.forward.small_operators import MERGED_DEVICES
from engine.layout.slots import SLOT_STEP, LaneLayout, Span, lane_counts
from engine.tensor_parallel.group import before_parting
from engine.tensor_parallel.split import all_agree
from engine.timing import Form, quickest

logger = logging.getLogger(__name__)

FEWEST_SLOTS = 256
RECORDED_DEVICES = ("cuda",)
COMPILING_DEVICES = ("cuda",)  # devices on which recordings contain programs of torch.compile
_OPERATORS = _ONE_BY_ONE, _MERGED = "one by one", "merged"  # forms of the small operators
# Errors of torch, transformers and libraries of kernels if a pass cannot be recorded.
_CANNOT = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError)
# Number of runs before the first recording of a shape, in which libraries allocate workspaces and
# kernels are loaded or compiled. Recordings at other lengths use the same kernels.
_NUM_WARM = 2
_LAST_NEAR = 1024  # slots: from here on the lengths of recordings double


class GraphBackend(Backend):
    """Backend for GPUs that replays decode passes from CUDA graphs; see `Backend`."""

    name = "graphs"
    is_captured = True

    def __init__(
        self,
        loaded: LoadedModel,
        lanes: LaneLayout,
        row_counts: Sequence[int],
        layers: Layers = (),
    ) -> None:
        """Allocate cache and buffers, without recording anything yet.

        row_counts  numbers of rows per lane for which passes are recorded, ascending
        layers  layers whose hidden states recordings return

        Raises:
            ModelError: passes of the model cannot be recorded on its device.
        """
        check_recordable(loaded.device)
        is_fused = why_not_fused(loaded.model) is None
        self._fused = FusedBackend(loaded, lanes) if is_fused else None
        self._inner: Recordable = self._fused or HuggingFaceBackend(loaded, lanes)
        self._name = loaded.name
        self._rank = loaded.rank
        self._device = loaded.device
        self._dtype = loaded.dtype
        self.cache = self._inner.cache
        self.row_counts = tuple(row_counts)
        self._lanes = lanes
        counts = lane_counts(lanes.count)
        self._shapes = dict.fromkeys((count, n) for count in counts for n in self.row_counts)
        # In inference mode, like passes. To a compiler other tensors are of another kind: every
        # program of `make_split` would be compiled again when a recording first runs it.
        with torch.inference_mode(self._device.type in COMPILING_DEVICES):
            self._inner.make_rooms(self._shapes)
        # (shape, visible slots) -> recording. The slots are EVERY_LENGTH if attention is split over
        # the keys; else there is one for each shape and length (`captured_len`).
        self._recorded: dict[tuple[Shape, int], Compute] = {}
        self._refused: set[tuple[Shape, int]] = set()  # keys as above: their recording failed
        self._may_refuse = False  # True: passes that cannot be recorded run kernel by kernel
        self._warm: set[Hashable] = set()  # kernels that have run before a recording (`_is_warm`)
        self._layers = layers
        # Buffers that all recordings write their results to; none uses them for anything else.
        most_rows = lanes.count * max(self.row_counts, default=0)
        self._features = self._inner.empty_features(most_rows, layers)
        self._logits = torch.empty(most_rows, loaded.vocab_size, device=loaded.device)
        # (number of steps, visible slots as above, choice after each) -> chain; made only at load.
        self._chains: dict[tuple[int, int, Choice], Compute] = {}
        # Shape -> the number of visible slots from which on attention is split over the keys.
        self._split_from: dict[Shape, int] = {}
        self._record = self._recorder()
        if self._rank is not None:
            before_parting(self.forget)
        if isinstance(self._inner, HuggingFaceBackend):
            self._try_out(self._inner)

    def _try_out(self, inner: HuggingFaceBackend) -> None:
        """Raise ModelError if passes make the host wait for the GPU, and so cannot be recorded.

        If the usual experts do, the ones for recordings (`experts.py`) are tried.
        """
        why = self._why_it_waits()
        if why is not None and inner.experts:
            inner.experts.is_used = True
            why = self._why_it_waits() and why
        if why is not None:
            raise ModelError(
                f"{self._name}: its passes cannot be recorded as CUDA graphs ({why}); use the "
                "backend reference"
            )

    def _why_it_waits(self) -> str | None:
        """Return why the smallest or the largest pass cannot be recorded, on any rank; else None.

        Nothing is recorded for the test, because a failed capture may leave the process in a worse
        state than a failed pass.
        """
        for shape in sorted({min(self._shapes), max(self._shapes)} if self._shapes else ()):
            failed: Exception | None = None
            try:
                with torch.inference_mode():
                    windows = self._inner.kinds.windows
                    rows = send(_first_rows(shape, self._lanes, len(windows)), self._device)
                    num_visible = min(FEWEST_SLOTS, self._lanes.num_slots)
                    # Libraries may allocate and wait in the first run.
                    self._compute(rows, shape, num_visible, self._layers)
                    with refusing_to_wait():
                        self._compute(rows, shape, num_visible, self._layers)
            except _CANNOT as error:
                failed = error
            self.wipe(0, self._lanes.total)
            # Agree after each shape: a rank that failed cannot add up results with the others.
            if not all_agree(failed, self._rank, self._device):
                return "it fails on another rank" if failed is None else one_line(failed)
        return None

    def _recorder(self) -> Record:
        """Return a function that makes recordings, and register it for recording choices.

        Recordings made after load are counted.
        """
        make = recorder(self._device)
        ours = weakref.ref(self)  # so that the registered function does not keep the weights alive

        def record(compute: Compute, rows: torch.Tensor, *, is_warm: bool = False) -> Compute:
            recorded = make(compute, rows, is_warm=is_warm)
            backend = ours()
            if backend is not None and not backend.is_loading:
                backend.num_late += 1
                logger.info("%s: recording %d after load", backend._name, backend.num_late)
            return recorded

        capture_on(self._device, Captures(record, self.row_counts, self._logits))
        return record

    def forget(self) -> None:
        """Drop all recordings (CUDA graphs) of passes and chains."""
        self._recorded.clear()
        self._refused.clear()
        self._chains.clear()
        self._warm.clear()

    def take_over(self, *, timed: bool = True, say: Say = silent) -> None:
        """Repack the weights, and drop all recordings, because they read the old weights."""
        self.forget()
        # A memory pool whose graphs are gone must not be used again.
        self._record = self._recorder()
        self._inner.take_over(timed=timed)
        self._may_refuse = timed
        # Only if `timed`: a pass without a recording uses single operators, with other last bits.
        can_merge = timed and self._shapes and self._device.type in MERGED_DEVICES
        if self._fused is not None and can_merge:
            self._choose_operators(self._fused)
        kept = set(self._recorded)
        # Only if `timed`: the split of the keys, and so a row's last bits, depends on their number.
        can_split = timed and self.row_counts and self._device.type in SPLIT_DEVICES
        if self._fused is not None and can_split:
            capacity = (self._lanes.num_slots - max(self.row_counts)) // SLOT_STEP * SLOT_STEP
            with torch.inference_mode():
                self._split_from = find_splits(
                    self._make_split,
                    self._captured,
                    self._lanes,
                    self._shapes,
                    capacity,
                    say,
                    self._fused.decide,  # all ranks must choose the same
                    self._fused.kinds.windows,
                )
            # Drop the masked recordings made for timing; the executor's `warm_up` makes those that
            # are needed.
            self._recorded = {
                key: recorded
                for key, recorded in self._recorded.items()
                if (key[1] == EVERY_LENGTH and key[0] in self._split_from)
                or (key in kept and self._length(*key) == key[1])
            }

    def _choose_operators(self, fused: FusedBackend) -> None:
        """Use merged small operators if they are right on all ranks and faster for one shape."""
        shape = min(self._shapes)
        spans = tuple(Span(self._lanes.first_slot(lane), shape[1]) for lane in range(shape[0]))
        num_visible = min(FEWEST_SLOTS, self._lanes.num_slots)
        rows = chains(spans, num_visible, self._inner.kinds.windows)
        made: dict[str, Compute] = {}

        def record(name: str) -> None:
            fused.is_merged = name == _MERGED
            with torch.inference_mode():
                made[name] = self._recording(rows, shape, num_visible)

        for step in (partial(fused.make_merged, self._shapes), partial(record, _MERGED)):
            why = None
            try:
                step()
            except ModelError as error:
                why = error
            if not all_agree(why, self._rank, self._device):
                fused.is_merged = False
                reason = why or "another rank cannot"
                logger.info("%s: small operators are not merged: %s", self._name, reason)
                return
        record(_ONE_BY_ONE)
        forms = [Form(name, name, partial(run_to_end, made[name], rows)) for name in _OPERATORS]
        # Any order: torch's products, which GPUs multiply with, have many anyway.
        name = quickest(forms, fused.decide, any_order=True)
        fused.is_merged = name == _MERGED
        self._recorded[shape, num_visible] = made[name]
        logger.info("%s: the small operators of a layer are %s", self._name, name)

    def _make_split(self, shape: Shape) -> None:
        """Compile split attention for a shape. Raises ModelError on all ranks if one cannot."""
        assert self._fused is not None
        why = None
        try:
            self._fused.make_split(shape)
        except ModelError as error:
            why = error
        if not all_agree(why, self._rank, self._device):
            raise why or ModelError("it cannot be compiled on another rank")

    def forward(
        self,
        rows: torch.Tensor,
        spans: Spans,
        *,
        num_visible: int,
        keep: torch.Tensor | None = None,
        layers: Layers = (),
    ) -> Output:
        """Run n rows, write their keys and values; return logits and features (see `Backend`)."""
        with torch.inference_mode():
            shape = len(spans), spans[0].num_rows
            is_shape = keep is None and shape in self._shapes and _are_alike(spans)
            is_usual = is_shape and layers in ((), self._layers)
            length = self._length(shape, num_visible)
            replay = self._recorded_at_load(shape, rows, length) if is_usual else None
            if replay is not None:
                logits = replay(rows)
                return Output(logits, self._features[: rows.shape[1]] if layers else None)
            out = self._inner.forward(
                rows, spans, num_visible=num_visible, keep=keep, layers=layers
            )
            if not is_shape:
                return out
            self.num_uncaptured += not self.is_loading
            # Recorded choices read logits here.
            return Output(self._logits[: rows.shape[1]].copy_(out.logits), out.features)

    def _recorded_at_load(
        self, shape: Shape, rows: torch.Tensor, num_visible: int
    ) -> Compute | None:
        """Return the recording of passes of this shape, or None; make it if the model is loading.

        One that fails is not tried again.
        """
        key = shape, num_visible
        if not self.is_loading or key in self._refused:
            return self._recorded.get(key)
        try:
            return self._captured(shape, rows, num_visible)
        except ModelError as error:
            if not self._may_refuse:
                raise
            level = logging.INFO if self._refused else logging.WARNING
            self._refused.add(key)
            logger.log(level, "passes of %d x %d rows are not recorded: %s", *shape, error)
            return None

    def _length(self, shape: Shape, num_visible: int) -> int:
        """Return EVERY_LENGTH if attention is split over the keys, else the visible slots."""
        is_split = num_visible >= self._split_from.get(shape, math.inf)
        return EVERY_LENGTH if is_split else num_visible

    def _captured(self, shape: Shape, rows: torch.Tensor, num_visible: int) -> Compute:
        """Return the recording of passes of this shape; record it first if there is none."""
        key = shape, num_visible
        if key not in self._recorded:
            self._recorded[key] = self._recording(rows, *key)
        return self._recorded[key]

    def has_chain(self, num_steps: int, *, num_visible: int, choice: Choice) -> bool:
        """True if `chain` has a recording of `num_steps` steps over `num_visible` slots."""
        return (num_steps, self._length((1, 1), num_visible), choice) in self._chains

    def chain(self, steps: torch.Tensor, *, num_visible: int, choice: Choice) -> torch.Tensor:
        """Run n passes of one row as one recording, so that the host waits for no token."""
        with torch.inference_mode():
            length = self._length((1, 1), num_visible)
            key = steps.shape[1] - NUM_SETTINGS, length, choice
            if key not in self._chains:
                assert self.is_loading, "a chain is recorded at load"

                def compute(there: torch.Tensor) -> torch.Tensor:
                    return self._steps(there, length, choice)

                is_warm = self._is_warm((choice, length == EVERY_LENGTH))
                try:
                    self._chains[key] = self._recorded_on_all(compute, steps, is_warm=is_warm)
                except RuntimeError as error:
                    logger.info("%s: a chain is not recorded: %s", self._name, one_line(error))
                    return compute(send(steps, self._device))
            return self._chains[key](steps)

    def _steps(self, steps: torch.Tensor, num_visible: int, choice: Choice) -> torch.Tensor:
        """Compute a chain of steps on the device; arguments and result as in `Backend.chain`."""
        num_steps = steps.shape[1] - NUM_SETTINGS
        ids, rest, inputs = steps[:1, :1], steps[1:-1], steps[-1]
        found = []
        for index in range(num_steps):
            row = torch.cat((ids, rest[:, index : index + 1]))
            logits = self._compute(row, (1, 1), num_visible).logits.float()
            numbers = torch.cat((inputs[index : index + 1], inputs[num_steps:]))
            found.append(choice.of(logits, numbers))
            ids = found[-1][:, :1].long()
        return torch.cat(found)

    def _recording(self, rows: torch.Tensor, shape: Shape, num_visible: int) -> Compute:
        """Return a recording of passes of this shape; it writes features and returns logits.

        Raises:
            ModelError: the pass cannot be recorded, or there is no memory for it; on all ranks.
        """
        logits, features = self._logits[: rows.shape[1]], self._features[: rows.shape[1]]

        def compute(there: torch.Tensor) -> torch.Tensor:
            out = self._compute(there, shape, num_visible, self._layers)
            if out.features is not None:
                features.copy_(out.features)
            return logits.copy_(out.logits)

        is_merged = self._fused is not None and self._fused.is_merged
        is_warm = self._is_warm((shape, num_visible == EVERY_LENGTH, is_merged))
        try:
            return self._recorded_on_all(compute, rows, is_warm=is_warm)
        except RuntimeError as error:
            if kind_of(error) is OutOfMemory:
                raise OutOfMemory(
                    f"{self._name}: no memory to capture passes as CUDA graphs "
                    f"({one_line(error)}); lower --max-model-len or --max-num-seqs"
                ) from error
            raise ModelError(
                f"{self._name}: a pass of {rows.shape[1]} rows cannot be captured as a CUDA graph "
                f"({one_line(error)}); use the backend {self._inner.name}"
            ) from error

    def _recorded_on_all(self, compute: Compute, rows: torch.Tensor, *, is_warm: bool) -> Compute:
        """Return a recording of `compute`; arguments as for `Record`.

        All ranks make it, or none: a rank that has it would add up its results with another pass of
        the others. A capture adds up nothing, so the ranks can agree after one that has failed.

        Raises:
            RuntimeError: it cannot be recorded, or memory is missing; on all ranks.
            RankError: memory was missing in a run, which the other ranks wait for.
        """
        # A library may have chosen another kernel, which must be prepared by a run first.
        for is_prepared in (True, False) if is_warm else (False,):
            error: RuntimeError | None = None
            try:
                recorded = self._record(compute, rows, is_warm=is_prepared)
            except RuntimeError as failure:
                error = failure
            if self._rank is not None and isinstance(error, RanShort):
                raise RankError(f"{self._name}: {one_line(error)}") from error
            if all_agree(error, self._rank, self._device):
                return recorded
            short = error if error is not None and lacks_memory(error) else None
            if not all_agree(short, self._rank, self._device):
                raise short or RuntimeError("out of memory on another rank")
            logger.info("not recorded: %s", error and one_line(error))
        raise error or RuntimeError("it fails on another rank")

    def _is_warm(self, kernels: Hashable) -> bool:
        """True if this was called for these kernels before; note that they run now."""
        was_asked = kernels in self._warm
        self._warm.add(kernels)
        return was_asked

    def _compute(
        self, rows: torch.Tensor, shape: Shape, num_visible: int, layers: Layers = ()
    ) -> Output:
        """Compute a pass on the device in the form to be recorded; return logits and features."""
        split = num_visible == EVERY_LENGTH
        words = [] if split else [words_of(rows, window) for window in self._inner.kinds.numbers]
        masks = [from_words(of_kind, num_visible, self._dtype) for of_kind in words]
        return self._inner.compute_recorded(rows, shape, masks or None, layers)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of the cache, all reads before any write (see `Backend.move`)."""
        self._inner.move(sources, targets)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy `length` slots of the cache from `source` on to `target` on (see `Backend.copy`)."""
        self._inner.copy(source, target, length)

    def wipe(self, first: int, length: int) -> None:
        """Write zeros to `length` slots of the cache from `first` on (see `Backend.wipe`)."""
        self._inner.wipe(first, length)

    def not_finite(self, first: int, length: int) -> int | None:
        """Return where NaN or infinity first occurred in these slots, or None (see `Backend`)."""
        return self._inner.not_finite(first, length)


def _first_rows(shape: Shape, lanes: LaneLayout, num_windows: int) -> torch.Tensor:
    """Return the rows [5 or more, lanes * n] of a chain at the start of each of the first lanes."""
    num_lanes, num_rows = shape
    where = torch.arange(num_rows)
    zeros, bits = torch.zeros_like(where), (2 << where) - 1
    firsts = [lanes.first_slot(lane) for lane in range(num_lanes)]
    seen = zeros, bits
    parts = [
        torch.stack((zeros, where, where + first, *seen * (1 + num_windows))) for first in firsts
    ]
    return torch.cat(parts, dim=1)


def _are_alike(spans: Spans) -> bool:
    """True if all lanes have equally many rows."""
    return all(span.num_rows == spans[0].num_rows for span in spans)


def captured_len(needed: int) -> int:
    """Return how many slots a recorded pass covers that needs `needed`: 256, 384, 512, 768, ...

    From 1,024 on the sizes double: a text of 32,000 tokens meets ten sizes. From 257 to 1,024
    slots, where attention is mostly not split over the keys, at most a third is wasted; beyond that
    at most half, where attention is not split.
    """
    size = FEWEST_SLOTS
    while size < needed:
        is_power = size & (size - 1) == 0
        if size >= _LAST_NEAR:
            size *= 2
        else:
            size = size * 3 // 2 if is_power else size * 4 // 3
    return size


def check_recordable(device: torch.device) -> None:
    """Raise ModelError if `device` is no GPU."""
    if device.type not in RECORDED_DEVICES:
        raise ModelError("CUDA graphs need a GPU; use the backend fused or reference")


def recorder(device: torch.device) -> Record:
    """Return a function that records CUDA graphs on `device`, all in one memory pool.

    A capture that fails may leave the pool in use: later recordings get another one.
    """
    pool = torch.cuda.graph_pool_handle()
    # One stream for all: libraries keep a workspace (cuBLAS: 32 MiB) for each stream they have met.
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(compute: Compute, rows: torch.Tensor, num_warm: int) -> Compute:
        nonlocal pool
        inbox = Inbox(rows, device)
        there = inbox.there
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(device)
        try:
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                _run(compute, there, num_warm)
            try:
                # "thread_local": other threads may make calls that are forbidden during a capture.
                with torch.cuda.graph(
                    graph, pool=pool, stream=side, capture_error_mode="thread_local"
                ):
                    result = compute(there)
            except RuntimeError:
                pool = torch.cuda.graph_pool_handle()
                raise
        finally:
            # A capture that raises leaves the process on its stream.
            torch.cuda.set_stream(stream)
            stream.wait_stream(side)

        def replay(rows: torch.Tensor) -> torch.Tensor:
            inbox.put(rows)
            graph.replay()
            return result

        return replay

    def record(compute: Compute, rows: torch.Tensor, *, is_warm: bool = False) -> Compute:
        return capture(compute, rows, 0 if is_warm else _NUM_WARM)

    return record


class RanShort(RuntimeError):
    """Memory was missing in a run before a capture."""


def _run(compute: Compute, there: torch.Tensor, count: int) -> None:
    """Run a computation `count` times. Raises RanShort for lack of memory."""
    try:
        for _ in range(count):
            compute(there)
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        raise RanShort(str(error)) from error
