"""The one forward signature of the engine, and its reference backend: unmodified transformers.

A backend is anything with `Backend`'s methods; callers never see whether it is eager, fused,
compiled or captured. It knows rows and slots, no session and no tree.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.checkpoint.model import LoadedModel
from engine.choice.coupling_on_gpu import Choice
from engine.device import send
from engine.errors import ModelError
from engine.forward.experts import RecordedExperts
from engine.forward.kv_cache import SlotCache, first_not_finite
from engine.forward.masks import Masks, as_words, from_words
from engine.layout.slots import Feed, LaneLayout, Span

# -- filling ---------------------------------------------------------------------------------------

# The rows of a pass as integers, and how they are filled up to a number of rows.
#
# Rows that fill a pass up write to scratch slots behind the cache, which nobody sees.

FEWEST_PROMPT_ROWS = 64
PROMPT_ROWS = 2048  # of a chunk on a GPU, at most
_SCORED_BYTES = 256 << 20  # of float32 logits, where those of all rows of a chunk are wanted


def rows_of(feed: Feed, first_slot: int) -> Any:
    """Return what a backend must know of the rows of one lane, [5, n] int64 (`Backend.forward`).

    first_slot  where the lane begins
    """
    slots = [first_slot + slot for slot in feed.slots] if first_slot else feed.slots
    words = as_words(feed.slots, feed.prefix_len, feed.masks)
    return np.array((feed.tokens, feed.positions, slots, *words), dtype=np.int64)


def filled(rows: Any | None, count: int, scratch: int) -> Any:
    """Fill a lane up to `count` rows: copies of its first that write from slot `scratch` on.

    Those of a lane without rows see its first slot.
    """
    num_rows = 0 if rows is None else rows.shape[1]
    if num_rows == count:
        return rows
    made = np.zeros((5, count), dtype=np.int64)
    made[3] = 1
    if rows is not None:
        made[:, :num_rows] = rows
        made[:, num_rows:] = rows[:, :1]
    made[2, num_rows:] = scratch + np.arange(count - num_rows)
    return made


def filled_prompt(rows: Any, scratch: int) -> Any:
    """Fill a chunk of a prompt up to 64, 128, 256, ... rows; all fillers write to one slot."""
    num_rows = rows.shape[1]
    count = max(FEWEST_PROMPT_ROWS, 1 << (num_rows - 1).bit_length())
    made = rows[:, np.minimum(np.arange(count), num_rows - 1)]
    made[2, num_rows:] = scratch
    return made


def scored_rows(vocab_size: int) -> int:
    """Most rows of a chunk of which all logits are wanted: 64, 128, 256, ... as chunks have."""
    fitting = max(1, _SCORED_BYTES // (4 * vocab_size))
    return min(PROMPT_ROWS, max(FEWEST_PROMPT_ROWS, 1 << (fitting.bit_length() - 1)))


# -- features --------------------------------------------------------------------------------------

# Features: hidden states that a forward hands out beside its logits, for heads that draft.
#
# Layers are named by integers: i >= 0 is what enters decoder layer i (transformers'
# hidden_states[i]; 0 are the embeddings), LAST what comes out of the last norm, which the output
# matrix multiplies. Owns what they may be and how those of several layers lie. Knows no head and no
# backend.

LAST = -1

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
    """Return hidden states side by side, in the order of `layers`; None if there are none.

    states  by layer, [n, hidden_size] each

    Returns [n, len(layers) * hidden_size], of one layer the tensor itself.
    """
    if len(layers) == 1:
        return states[layers[0]]
    return torch.cat([states[layer] for layer in layers], dim=1) if layers else None


def as_bytes(features: torch.Tensor) -> bytes:
    """Rows of features [n, F] as they travel: one behind the other, in their own type."""
    raw: bytes = features.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return raw


# -- forward ---------------------------------------------------------------------------------------

Spans = tuple[Span, ...]
Shape = tuple[int, int]
"""Lanes of a pass that is recorded, and the rows that each of them has."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a forward gives, on the model's device, in its dtype.

    logits    [k, V] of the rows that were asked for. Valid until the next pass
    features  [n, len(layers) * hidden_size] of all rows, layers side by side in the order in which
              they were asked for; None: nobody asked. Valid until the next pass
    """

    logits: torch.Tensor
    features: torch.Tensor | None = None


Say = Callable[[str], None]
"""Told what is being done while a node loads"""


def silent(_state: str) -> None:
    """Nobody is told."""


class Backend(Protocol):
    """One model with one cache on one device.

    name         how it is called in messages and options
    is_captured  it runs recordings of a few shapes, so that `num_visible` has few values
    is_loading   set by whoever has warmed it up: from then on it is expected to be ready
    num_uncaptured  decode passes that a captured backend had no recording for
    num_late     recordings that it has made since it was loaded: texts have waited for them
    row_counts   numbers of rows that it is made for, ascending; none: it takes any as it is
    """

    name: str
    is_captured: bool = False
    is_loading: bool = True
    num_uncaptured: int = 0
    num_late: int = 0
    row_counts: tuple[int, ...] = ()

    def forward(
        self,
        rows: torch.Tensor,
        spans: Spans,
        *,
        num_visible: int,
        keep: torch.Tensor | None = None,
        layers: Layers = (),
    ) -> Output:
        """Run n rows, and write their keys and values.

        rows         [5, n] int64, CPU, a column for each row: its token id, its position on its
                     path, the slot where its key and value go, and what it sees in two words
                     of its lane (`masks.as_words`)
        spans        the lanes that the rows see, in their order
        num_visible  of each lane slots [0, num_visible) take part: all that any row sees
        keep         [k] int64, CPU: rows whose logits are wanted; None is all
        layers       whose hidden states are wanted, of all rows (`features_of`)
        """

    def has_chain(self, num_steps: int, *, num_visible: int, choice: Choice) -> bool:
        """Whether `chain` has a recording of so many steps over so many slots."""
        del num_steps, num_visible, choice
        return False

    def chain(self, steps: torch.Tensor, *, num_visible: int, choice: Choice) -> torch.Tensor:
        """Run passes of one row each, each of the token that the one before it has chosen.

        Only of a backend that `is_captured`, and after load only where `has_chain`.

        steps   [6, n + NUM_SETTINGS] int64, CPU: a column for each of n steps, all of one lane,
                whose first five numbers are as in `forward` (the token of the first step alone
                counts); below, in all columns, what `choice_inputs` says of these steps
        choice  of one token

        Returns [n, 3] float64 on the device, as `Choice.of` does, valid until the next call.
        """
        del steps, num_visible, choice
        raise AssertionError(f"the backend {self.name} has no recordings")

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of the cache, all reads before any write."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy `length` slots from `source` on to those from `target` on, which are others."""

    def wipe(self, first: int, length: int) -> None:
        """Write zeros to `length` slots from `first` on."""

    def not_finite(self, first: int, length: int) -> int | None:
        """Return which of `length` slots from `first` on has brought NaN or infinity.

        It is the first slot with such a number in the lowest layer that has any: further up all
        rows of its pass have them. The slot is the result modulo `length`, the rest says which
        layer (`first_not_finite`). None: there are none.
        """

    def take_over(self, *, timed: bool = True, say: Say = silent) -> None:
        """Lay the weights out as suits this backend; the model itself may not run afterwards.

        timed  clocks may decide how: faster, but every process may then have its own last bits
        say    is told what takes long
        """


class Recordable(Backend, Protocol):
    """A backend whose passes can be recorded (`graphs.py`): it finds their lanes on the device."""

    cache: Any

    def make_rooms(self, shapes: Iterable[Shape]) -> None:
        """Take the memory that recorded passes of these shapes need, if it must outlive them."""

    def empty_features(self, num_rows: int, layers: Layers) -> torch.Tensor:
        """Return memory for the features of so many rows."""

    def compute_recorded(
        self, rows: torch.Tensor, shape: Shape, mask: torch.Tensor | None, layers: Layers = ()
    ) -> Output:
        """A pass of so many lanes and rows of each, of whatever lanes: all its logits.

        Nothing in it waits for the device, and no Python integer depends on which lanes they are.

        rows   as in `Backend.forward`, but on the device
        mask   [1, 1, lanes * n, num_visible], added to the scores; None: attention goes by the
               words of the rows, where the backend can do that
        """


class HuggingFaceBackend(Recordable):
    """Any transformers causal language model that takes a four-dimensional mask."""

    name = "reference"

    def __init__(self, loaded: LoadedModel, lanes: LaneLayout) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._dtype = loaded.dtype
        self._hidden_size = loaded.hidden_size
        self._lanes = lanes
        self._masks = Masks(loaded.dtype)
        self.experts = RecordedExperts(loaded.model)
        self.cache = SlotCache(loaded.model, lanes.total, loaded.device)
        parameters = inspect.signature(loaded.model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters

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
        counts = tuple(span.num_rows for span in spans)
        if self._device.type == "cpu":
            mask = self._masks.build(rows, num_visible, counts)
        else:
            rows = send(rows, self._device)
            mask = from_words(rows[3:], num_visible, self._dtype)
        keep = None if keep is None else send(keep, self._device)
        with torch.inference_mode():
            if len(spans) == 1:
                return self._run(rows, spans[0], mask, keep, layers)
            # One lane after another: simple, and exact for any architecture.
            sizes = list(counts)
            parts = torch.split(rows, sizes, 1), spans, torch.split(mask, sizes, 2)
            outs = [self._run(*part, None, layers) for part in zip(*parts, strict=True)]
            logits = torch.cat([out.logits for out in outs])
            features = [out.features for out in outs if out.features is not None]
            return Output(
                logits if keep is None else logits[keep], torch.cat(features) if features else None
            )

    def _run(
        self,
        rows: torch.Tensor,
        span: Span,
        mask: torch.Tensor,
        keep: torch.Tensor | None,
        layers: Layers,
    ) -> Output:
        """Run the rows of one lane; everything is on the device."""
        ids, positions, slots = rows[:3]
        first_slot = _first_of_run(slots) if self._device.type == "cpu" else None
        self.cache.begin(slots, first_slot, span.first_slot, mask.shape[3])
        options: dict[str, Any] = {}
        if keep is not None and self._keeps_logits:
            options["logits_to_keep"] = keep
        out = self._call(ids[None], positions[None], mask, layers, options)
        if keep is not None and not self._keeps_logits:
            return Output(out.logits[keep], out.features)
        return out

    def _call(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        layers: Layers,
        options: Mapping[str, Any],
    ) -> Output:
        """Run the rows [lanes, n] of a pass that the cache has been told of."""
        out = self._model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            **({"output_hidden_states": True} if layers else {}),
            **options,
        )
        # transformers' last one is behind the last norm, and so is ours.
        states = {layer: out.hidden_states[layer].flatten(0, 1) for layer in layers}
        return Output(out.logits.flatten(0, 1), features_of(states, layers))

    def make_rooms(self, shapes: Iterable[Shape]) -> None:
        """See `Recordable.make_rooms`: all memory of a recording is its own, but the cache."""
        del shapes

    def empty_features(self, num_rows: int, layers: Layers) -> torch.Tensor:
        """See `Recordable.empty_features`."""
        size = num_rows, len(layers) * self._hidden_size
        return torch.empty(size, dtype=self._dtype, device=self._device)

    def compute_recorded(
        self, rows: torch.Tensor, shape: Shape, mask: torch.Tensor | None, layers: Layers = ()
    ) -> Output:
        """See `Recordable.compute_recorded`: lanes are transformers' batch."""
        assert mask is not None, "transformers' attention takes a mask"
        ids, positions, slots = rows[:3].reshape(3, *shape).unbind()
        self.cache.begin_lanes(slots, mask.shape[3], self._lanes)
        with self.experts:
            return self._call(ids, positions, mask.view(shape[0], 1, shape[1], -1), layers, {})

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Backend.move`."""
        with torch.inference_mode():
            self.cache.move(sources, targets)

    def copy(self, source: int, target: int, length: int) -> None:
        """See `Backend.copy`."""
        with torch.inference_mode():
            self.cache.copy(source, target, length)

    def wipe(self, first: int, length: int) -> None:
        """See `Backend.wipe`."""
        with torch.inference_mode():
            self.cache.wipe(first, length)

    def not_finite(self, first: int, length: int) -> int | None:
        """See `Backend.not_finite`."""
        with torch.inference_mode():
            return first_not_finite(self.cache.parts(), first, length)

    def take_over(self, *, timed: bool = True, say: Say = silent) -> None:
        """Nothing to do: it runs the model as it is."""
        del timed, say


def _first_of_run(slots: torch.Tensor) -> int | None:
    """Return slots[0] if the slots are consecutive and ascending, else None."""
    array = slots.numpy()
    first = int(array[0])
    if int(array[-1]) - first != len(array) - 1:
        return None
    return first if len(array) < 3 or bool((np.diff(array) == 1).all()) else None
