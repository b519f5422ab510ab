"""The interface of all forward passes (`Backend`), and the reference backend: plain transformers.

A backend is anything with `Backend`'s methods; callers never see whether it is eager, fused,
compiled or recorded as CUDA graphs. It knows rows and slots, but no text and no tree.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import torch

from engine.checkpoint.families import BY_ROW, FUSED
from engine.checkpoint.model import LoadedModel
from engine.choice.coupling_on_gpu import Choice
from engine.device import send
from engine.errors import ModelError
from engine.forward import by_row, cpu_experts
from engine.forward.by_row import ByRow
from engine.forward.cache_tensors import SlotCache, cache_arguments, first_not_finite
from engine.forward.experts import RecordedExperts
from engine.forward.masks import KindMasks, as_words, window_words
from engine.forward.more_layers import has_states, more_in_slots
from engine.layout.attention_windows import AttentionWindow, LayerKinds
from engine.layout.slots import Feed, LaneLayout, Span
from engine.quantised.linear import is_quantised
from engine.tensor_parallel.split import first_says

# -- filling ---------------------------------------------------------------------------------------

# The rows of a pass as integers, and their padding to a certain number of rows.
#
# Padding rows write to scratch slots behind the cache, which no other row sees.

FEWEST_LARGE_ROWS = 32  # of a decode pass that is padded, but has more rows than any recording
Spans = tuple[Span, ...]


def rows_of(feed: Feed, first_slot: int, windows: Sequence[AttentionWindow] = ()) -> Any:
    """Return the rows of one lane as integers, as `Backend.forward` takes them.

    Returns [5 + 2 len(windows), n] int64 numpy.

    first_slot  the lane's first slot in the whole cache
    windows     the model's attention windows
    """
    slots = [first_slot + slot for slot in feed.slots] if first_slot else feed.slots
    words: tuple[Sequence[int], ...] = as_words(feed.slots, feed.prefix_len, feed.masks)
    if windows:
        near = feed.near or (None,) * len(windows)
        for window, masks in zip(windows, near, strict=True):
            words += window_words(feed.positions, words[0], words[1], window, masks)
    return np.array((feed.tokens, feed.positions, slots, *words), dtype=np.int64)


def filled(rows: Any | None, count: int, scratch: int, num_windows: int = 0) -> Any:
    """Return a lane's rows [5 or more, n] padded to `count` rows, int64.

    Padding rows are copies of the first row that write to slots from `scratch` on; in a lane
    without rows (None) of a model with so many windows they see only its first slot.
    """
    num_rows = 0 if rows is None else rows.shape[1]
    if num_rows == count:
        return rows
    num_integers = 5 + 2 * num_windows if rows is None else len(rows)
    made = np.zeros((num_integers, count), dtype=np.int64)
    made[3] = 1
    if rows is not None:
        made[:, :num_rows] = rows
        made[:, num_rows:] = rows[:, :1]
    made[2, num_rows:] = scratch + np.arange(count - num_rows)
    return made


def filled_up(by_lane: Mapping[int, Any], fewest: int, scratch: int) -> dict[int, Any]:
    """Return the rows [5 or more, n] of a pass's lanes, the last lane's padded.

    All lanes together then have `fewest` rows, or twice as many, four times ... Padding rows are
    copies of the last row that write to slot `scratch`.
    """
    last = max(by_lane)
    num_rows, together = by_lane[last].shape[1], sum(rows.shape[1] for rows in by_lane.values())
    count = num_rows - together + max(fewest, 1 << (together - 1).bit_length())
    made = by_lane[last][:, np.minimum(np.arange(count), num_rows - 1)]
    made[2, num_rows:] = scratch
    return {**by_lane, last: made}


def are_consecutive(indices: Sequence[int]) -> bool:
    """True if the indices are consecutive and ascending, or there are none."""
    return not indices or tuple(indices) == tuple(range(indices[0], indices[0] + len(indices)))


def joined(by_lane: Mapping[int, Any], lanes: LaneLayout) -> tuple[Any, Spans, Mapping[int, int]]:
    """Join the rows of all lanes, ordered by lane; return (rows, spans, lane -> first row)."""
    spans, starts, num_rows = [], {}, 0
    for lane in sorted(by_lane):
        spans.append(Span(lanes.first_slot(lane), by_lane[lane].shape[1]))
        starts[lane] = num_rows
        num_rows += spans[-1].num_rows
    parts = [by_lane[lane] for lane in starts]
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return rows, tuple(spans), starts


# -- features --------------------------------------------------------------------------------------

# Features: hidden states that a forward returns beside its logits, for heads that draft.
#
# Layers are named by integers: i >= 0 is the input of decoder layer i (transformers'
# hidden_states[i]; 0 is the embeddings), LAST is the output of the last norm, which the output
# matrix multiplies. Owns which layers are allowed and the order of several layers' features. Knows
# no head and no backend.

LAST = -1

_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # all ones: infinity, or no number

Layers = tuple[int, ...]


def check_layers(name: str, num_layers: int, layers: Layers) -> None:
    """Raise ModelError if a model of `num_layers` decoder layers has no such hidden states."""
    for layer in layers:
        if not LAST <= layer < num_layers:
            raise ModelError(
                f"{name}: there is no layer {layer}, only 0 to {num_layers - 1} and {LAST} (after "
                "the last norm); use a head made for this model"
            )


def features_of(states: Mapping[int, torch.Tensor], layers: Layers) -> torch.Tensor | None:
    """Return the layers' hidden states concatenated, [n, len(layers) * hidden_size]; None for ().

    For one layer it is the tensor itself, not a copy.

    states  layer -> its hidden states [n, hidden_size]
    layers  the layers that are wanted, in this order
    """
    if len(layers) == 1:
        return states[layers[0]]
    return torch.cat([states[layer] for layer in layers], dim=1) if layers else None


def are_finite(features: torch.Tensor) -> bool:
    """True if all numbers of features on the host are finite.

    Of a few rows torch takes ten times as long to say so.
    """
    if features.dtype == torch.float32:
        return bool(np.isfinite(features.numpy()).all())
    exponent = _EXPONENTS[features.dtype]
    words = features.contiguous().view(torch.int16).numpy()
    return not bool((words & exponent == exponent).any())


def as_bytes(features: torch.Tensor) -> bytes:
    """Return features [n, F] as the bytes of a message: row by row, in their own dtype."""
    raw: bytes = features.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return raw


# -- forward ---------------------------------------------------------------------------------------

Shape = tuple[int, int]
"""Shape of a recorded pass: number of lanes, number of rows of each lane."""


@dataclass(frozen=True, slots=True)
class Output:
    """Result of a forward pass, on the model's device, in its dtype; valid until the next pass.

    logits    [k, V]: of the rows that were asked for; or [k, D], if `ids` is there
    features  [n, len(layers) * hidden_size]: hidden states of all rows, the wanted layers
              concatenated in the order asked for; None: none were wanted
    ids       int64 [D] ascending: the tokens that have logits, the others have -inf (a head that
              drafts only common tokens); None: all have
    """

    logits: torch.Tensor
    features: torch.Tensor | None = None
    ids: torch.Tensor | None = None


def over_all(logits: torch.Tensor, ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Return the logits [k, V] of all tokens for those of some, as `Output` has them."""
    if ids is None:
        return logits
    made = logits.new_full((len(logits), vocab_size), -torch.inf)
    return made.index_copy_(1, ids, logits)


@dataclass(frozen=True, slots=True)
class ModelPass:
    """A forward pass, ready to run; its tensors are on the CPU.

    rows, spans, num_visible  as in `Backend.forward`
    num_asked    number of rows whose logits are wanted
    keep         [num_asked] int64: indices of these rows; None: consecutive rows from `start` on
    start        index of the first row whose logits are wanted, if `keep` is None
    is_padded    True if the pass is padded to a certain number of rows; then the logits of all rows
                 are computed, and the wanted ones are picked afterwards
    fed          per feed, the slice of its rows; all other rows are padding
    """

    rows: torch.Tensor
    spans: Spans
    num_visible: int
    num_asked: int
    keep: torch.Tensor | None
    is_padded: bool
    fed: tuple[slice, ...]
    start: int = 0


Say = Callable[[str], None]
"""Function that is called with a short text for each step while a node loads"""


def silent(_state: str) -> None:
    """Do nothing: the default for a function that reports the steps of loading."""


class Backend(Protocol):
    """An implementation of a model's forward pass, with its cache, on one device.

    name         its name in messages and options
    is_captured  True if it runs recordings (CUDA graphs) of a few shapes; then `num_visible` should
                 have only few different values
    is_loading   True until the warm-up has ended, when the executor sets it to False
    num_uncaptured  number of decode passes that had no recording and ran kernel by kernel
    num_late     number of recordings made after load, while texts waited
    row_counts   numbers of rows for which it has programs or graphs, ascending; (): any number
    is_by_row    True: its forms are made so that a row's logits do not depend on the rest of a pass
    """

    name: str
    is_captured: bool = False
    is_loading: bool = True
    num_uncaptured: int = 0
    num_late: int = 0
    row_counts: tuple[int, ...] = ()
    is_by_row: bool = False

    @property
    def forms(self) -> str:
        """Return in words what computes its passes, for people."""
        return "transformers' operators"

    def forward(
        self,
        rows: torch.Tensor,
        spans: Spans,
        *,
        num_visible: int,
        keep: torch.Tensor | None = None,
        layers: Layers = (),
    ) -> Output:
        """Run n rows, write their keys and values to the cache; return logits and features.

        rows         [5 + 2 * number of windows, n] int64, CPU; a column per row: its token id, its
                     position on its path, the slot of the whole cache for its key and value, two
                     words that say what it sees in its lane (`masks.as_words`), and two more for
                     each attention window of the model (`masks.window_words`)
        spans        the lanes of the rows, in the rows' order
        num_visible  slots [0, num_visible) of each lane take part; no row sees others
        keep         [k] int64, CPU: indices of the rows whose logits are wanted; None: all
        layers       layers whose hidden states are wanted, of all rows (`features_of`)
        """

    def has_chain(self, num_steps: int, *, num_visible: int, choice: Choice) -> bool:
        """True if `chain` has a recording of `num_steps` steps over `num_visible` slots."""
        del num_steps, num_visible, choice
        return False

    def chain(self, steps: torch.Tensor, *, num_visible: int, choice: Choice) -> torch.Tensor:
        """Run n passes of one row each, each with the token that the pass before it chose.

        Only for a backend that `is_captured`; after load only if `has_chain` is True.

        steps   [6 or more, n + NUM_SETTINGS] int64, CPU. In the first n columns, one per step of
                the same lane, all numbers but the last are as in `forward` (only the first step's
                token is used). The last number of all columns is `choice_inputs` of these steps
        choice  how one token is chosen after each step

        Returns [n, 3] float64 on the device, as `Choice.of` does, valid until the next call.
        """
        del steps, num_visible, choice
        raise AssertionError(f"the backend {self.name} has no recordings")

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of the cache, all reads before any write."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy `length` slots starting at `source` to those starting at `target`; no overlap."""

    def wipe(self, first: int, length: int) -> None:
        """Write zeros to `length` slots, starting at slot `first`."""

    def not_finite(self, first: int, length: int) -> int | None:
        """Return in which of the slots [first, first + length) NaN or infinity first occurred.

        That is the first slot with such a number in the lowest layer that has any (in the layers
        above all rows of the pass have it). The result modulo `length` is the slot, counted from
        `first`; its quotient says which layer (`first_not_finite`). None: all numbers are finite.
        """

    def take_over(self, *, timed: bool = True, say: Say = silent) -> None:
        """Repack the weights for this backend; the model's own forward may not run afterwards.

        timed  True: layouts are chosen by timing, which is faster, but the last bits of logits may
               differ from process to process
        say    is called with a short text for each step that takes long
        """


class Recordable(Backend, Protocol):
    """A backend whose passes can be recorded as CUDA graphs (`graphs.py`).

    A recorded pass finds its lanes on the device, so one recording serves any lanes.
    """

    cache: Any
    kinds: LayerKinds

    def make_rooms(self, shapes: Iterable[Shape]) -> None:
        """Allocate the memory that recorded passes of these shapes write to, for ever."""

    def empty_features(self, num_rows: int, layers: Layers) -> torch.Tensor:
        """Return uninitialised memory for features, [num_rows, len(layers) * hidden_size]."""

    def compute_recorded(
        self,
        rows: torch.Tensor,
        shape: Shape,
        masks: Sequence[torch.Tensor] | None,
        layers: Layers = (),
    ) -> Output:
        """Compute a pass in a form that can be recorded; return all logits, and features.

        It never waits for the device, and no Python integer depends on which lanes are used.

        rows   [5 or more, lanes * n] int64 as in `Backend.forward`, but on the device
        shape  (lanes, n): number of lanes, and rows of each
        masks  per kind of layer, [1, 1, lanes * n, num_visible], added to the scores; None:
               attention reads the words of the rows instead, if the backend can do that
        """


def _is_causal(rows: torch.Tensor) -> bool:
    """True if a lane's rows are those of a prompt, of which each sees one more than that before."""
    return bool(rows[3, 0] != rows[3, -1])


def _facts(rows: torch.Tensor, span: Span) -> tuple[int, int, int, int]:
    """Return what `SlotCache.note` is told of a lane's rows, which are on the host."""
    first = int(rows[2].min()) - span.first_slot
    committed = first if _is_causal(rows) else min(first, int(rows[3, 0]))
    # Rows of padding stand at the position of the last one.
    count = int((rows[1] == rows[1, 0] + torch.arange(rows.shape[1])).sum())
    return first, committed, int(rows[1].max()) + 1, count


class HuggingFaceBackend(Recordable):
    """Backend that runs a transformers causal language model as it is, with a 4-D mask."""

    name = "reference"

    def __init__(self, loaded: LoadedModel, lanes: LaneLayout) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._rank = loaded.rank
        self._dtype = loaded.dtype
        self._hidden_size = loaded.hidden_size
        self._lanes = lanes
        self.kinds = loaded.kinds.within(lanes.num_slots)
        self._masks = KindMasks(self.kinds, loaded.device, loaded.dtype)
        self.experts = RecordedExperts(loaded.model)
        before = more_in_slots(loaded.model)
        self._has_states = has_states(loaded.model)
        # Layers that are no attention take no mask of ours.
        others = ("linear_attention",) if self._has_states else ("conv",)
        self._names = (*self.kinds.layer_types, *(others if before else ()))
        where = lanes.total, loaded.device
        self.cache = SlotCache(loaded.model, *where, self.kinds.of_layers, before)
        parameters = inspect.signature(loaded.model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._by_row: ByRow | None = None  # linear layers and attention of our own, on CPUs
        self._is_recorded = False

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
        counts = tuple(span.num_rows for span in spans)
        told = torch.split(rows, list(counts), 1)
        rows, masks = self._masks.build(rows, num_visible, counts)
        keep = None if keep is None else send(keep, self._device)
        with torch.inference_mode():
            if len(spans) == 1:
                return self._run(told[0], rows, spans[0], masks, num_visible, keep, layers)
            # One lane after another: simple, and exact for any architecture.
            sizes = list(counts)
            by_lane = zip(*(torch.split(mask, sizes, 2) for mask in masks), strict=True)
            parts = told, torch.split(rows, sizes, 1), spans, by_lane
            outs = [
                self._run(*part, num_visible, None, layers) for part in zip(*parts, strict=True)
            ]
            logits = torch.cat([out.logits for out in outs])
            features = [out.features for out in outs if out.features is not None]
            return Output(
                logits if keep is None else logits[keep], torch.cat(features) if features else None
            )

    def _run(
        self,
        told: torch.Tensor,
        rows: torch.Tensor,
        span: Span,
        masks: Sequence[torch.Tensor],
        num_visible: int,
        keep: torch.Tensor | None,
        layers: Layers,
    ) -> Output:
        """Run the rows of one lane; return logits and features.

        told, rows  the rows on the host, and on the device
        """
        ids, positions, slots = rows[:3]
        first_slot = _first_of_run(slots) if self._device.type == "cpu" else None
        lengths = tuple(mask.shape[3] for mask in masks)
        self.cache.begin(slots, first_slot, span.first_slot + num_visible, lengths)
        if self._has_states:
            self.cache.note(*_facts(told, span), is_chain=_is_causal(told))
        self.cache.see(positions[None], masks[0])
        if self._by_row is not None:
            self._by_row.see(rows, (span,))
        options: dict[str, Any] = {}
        if keep is not None and self._keeps_logits:
            options["logits_to_keep"] = keep
        out = self._call(ids[None], positions[None], masks, layers, options)
        if keep is not None and not self._keeps_logits:
            return Output(out.logits[keep], out.features)
        return out

    def _call(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        masks: Sequence[torch.Tensor],
        layers: Layers,
        options: Mapping[str, Any],
    ) -> Output:
        """Run the model on ids and positions [lanes, n], after `begin` of the cache was called.

        masks  per kind of layer, [lanes, 1, n, slots that it sees]
        """
        if len(self._names) == 1:
            mask: Any = masks[0]
        else:  # transformers' models with layers of several kinds take their masks by name
            mask = {"sliding_attention": masks[0], **dict(zip_longest(self._names, masks))}
        told = cache_arguments(self._model, self.cache)
        if "past_key_values" in told:  # models without attention take neither of these
            told |= {"attention_mask": mask, "position_ids": positions}
        linear_layers = nullcontext() if self._by_row is None else self._by_row.linear_layers()
        with self.experts, linear_layers:
            out = self._model(
                ids,
                **told,
                **({"output_hidden_states": True} if layers else {}),
                **options,
            )
        # Index -1 is the state after the last norm, in transformers as in LAST.
        states = {layer: out.hidden_states[layer].flatten(0, 1) for layer in layers}
        return Output(out.logits.flatten(0, 1), features_of(states, layers))

    @property
    def is_by_row(self) -> bool:  # type: ignore[override]
        """True if all linear layers and all attention so far were computed by our own."""
        own = self._by_row
        if own is None or self._has_states:  # sums of states go by other rows too
            return False
        return own.num_own > 0 and not own.num_others

    @property
    def forms(self) -> str:
        """Return in words what computes its passes, for people."""
        if self._by_row is None:
            return "transformers' operators"
        what = "linear layers" + (" and attention" if self._by_row.num_own else "")
        return f"transformers' modules, {what} in our C++"

    def make_rooms(self, shapes: Iterable[Shape]) -> None:
        """Recordings of this backend allocate their own memory, except the cache."""
        del shapes
        self._is_recorded = True

    def empty_features(self, num_rows: int, layers: Layers) -> torch.Tensor:
        """Return uninitialised memory for features, [num_rows, len(layers) * hidden_size]."""
        size = num_rows, len(layers) * self._hidden_size
        return torch.empty(size, dtype=self._dtype, device=self._device)

    def compute_recorded(
        self,
        rows: torch.Tensor,
        shape: Shape,
        masks: Sequence[torch.Tensor] | None,
        layers: Layers = (),
    ) -> Output:
        """Compute a pass in a form that can be recorded; lanes are the batch of transformers."""
        assert masks is not None, "transformers' attention takes a mask"
        if self._has_states:
            raise RuntimeError("layers with a running state are not recorded yet")
        ids, positions, slots = rows[:3].reshape(3, *shape).unbind()
        self.cache.begin_lanes(slots, masks[0].shape[3], self._lanes)
        by_lane = [mask.view(shape[0], 1, shape[1], -1) for mask in masks]
        self.cache.see(positions, by_lane[0])
        return self._call(ids, positions, by_lane, layers, {})

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of the cache, all reads before any write (see `Backend.move`)."""
        with torch.inference_mode():
            self.cache.move(sources, targets)
            if self._by_row is not None:
                self._by_row.attention.move(*torch.tensor((sources, targets)).unbind())

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy `length` slots of the cache from `source` on to `target` on (see `Backend.copy`)."""
        with torch.inference_mode():
            self.cache.copy(source, target, length)
            if self._by_row is not None:
                self._by_row.attention.copy(source, target, length)

    def wipe(self, first: int, length: int) -> None:
        """Write zeros to `length` slots of the cache from `first` on (see `Backend.wipe`)."""
        with torch.inference_mode():
            self.cache.wipe(first, length)

    def not_finite(self, first: int, length: int) -> int | None:
        """Return where NaN or infinity first occurred in these slots, or None (see `Backend`)."""
        with torch.inference_mode():
            return first_not_finite(self.cache.parts(), first, length)

    def take_over(self, *, timed: bool = True, say: Say = silent) -> None:
        """On a CPU let a mixture's experts run in their fastest form (`cpu_experts.py`).

        If `timed`, also read fewer keys in windows: how many are read depends on all rows of a
        pass, and a row's last bits on that. Where our C++ is there, linear layers and attention
        are ours (`by_row.py`). Apart from that the model runs as it is.
        """
        self._masks.are_cut = timed
        is_alone = self._device.type == "cpu" and self._rank is None and not self._is_recorded
        is_known = self._has_states or self._model.config.model_type in {*FUSED, *BY_ROW}
        if timed and is_alone and is_known and not is_quantised(self._model):
            with torch.inference_mode():
                self._by_row = by_row.take_over(self._model, self.cache, self.kinds)

        if self._device.type == "cpu" and self.experts and not self.experts.is_used:
            say("laying out experts")
            decide = partial(first_says, rank=self._rank, device=self._device)
            with torch.inference_mode():
                is_by_row = self._by_row is not None
                cpu_experts.take_over(self._model, decide, timed=timed, is_by_row=is_by_row)


def _first_of_run(slots: torch.Tensor) -> int | None:
    """Return slots[0] if the slots are consecutive and ascending, else None."""
    array = slots.numpy()
    first = int(array[0])
    if int(array[-1]) - first != len(array) - 1:
        return None
    return first if len(array) < 3 or bool((np.diff(array) == 1).all()) else None
