"""The one forward signature of the engine, and its reference backend: unmodified transformers.

A backend is anything with `Backend`'s methods; callers never see whether it is eager, fused,
compiled or captured. It knows rows and slots, no session and no tree.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.device import send
from engine.errors import ModelError
from engine.kv_cache import SlotCache
from engine.masks import Masks, from_words
from engine.model import LoadedModel
from engine.slots import Move


@dataclass(frozen=True, slots=True)
class Output:
    """What a forward gives, of the rows that were asked for; on the model's device, in its dtype.

    logits  [k, V]
    hidden  [k, hidden_size] after the last norm, which the head multiplies; None: nobody asked
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class Backend(Protocol):
    """One model with one cache on one device.

    name         how it is called in messages and options
    is_captured  it runs recordings of a few shapes, so that `num_visible` has few values
    is_loading   set by whoever has warmed it up: from then on it is expected to be ready
    num_uncaptured  decode passes that a captured backend had no recording for
    row_counts   numbers of rows that it is made for, ascending; none: it takes any as it is
    """

    name: str
    is_captured: bool = False
    is_loading: bool = True
    num_uncaptured: int = 0
    row_counts: tuple[int, ...] = ()

    def forward(
        self,
        rows: torch.Tensor,
        *,
        num_visible: int,
        keep: torch.Tensor | None = None,
        with_hidden: bool = False,
    ) -> Output:
        """Run n rows, and write their keys and values.

        rows         [5, n] int64, CPU, a column for each row: its token id, its position on its
                     path, the slot where its key and value go, and what it sees in two words
                     (`masks.as_words`)
        num_visible  slots [0, num_visible) take part; it covers all that any row sees
        keep         [k] int64, CPU: rows whose output is wanted; None is all
        with_hidden  return their hidden states too

        Raises:
            ModelError: this backend does not give hidden states.
        """

    def move(self, move: Move) -> None:
        """Copy cache slots, all reads before any write."""

    def take_over(self, *, timed: bool = True) -> None:
        """Lay the weights out as suits this backend; the model itself may not run afterwards.

        timed  clocks may decide how: faster, but every process may then have its own last bits
        """


class HuggingFaceBackend(Backend):
    """Any transformers causal language model that takes a four-dimensional mask."""

    name = "reference"

    def __init__(self, loaded: LoadedModel, num_slots: int) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._dtype = loaded.dtype
        self._masks = Masks(loaded.dtype)
        self.cache = SlotCache(loaded.model, num_slots, loaded.device)
        parameters = inspect.signature(loaded.model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters

    def forward(
        self,
        rows: torch.Tensor,
        *,
        num_visible: int,
        keep: torch.Tensor | None = None,
        with_hidden: bool = False,
    ) -> Output:
        """See `Backend.forward`."""
        if self._device.type == "cpu":
            first_slot, mask = _first_of_run(rows[2]), self._masks.build(rows[3:], num_visible)
        else:
            rows = send(rows, self._device)
            first_slot, mask = None, from_words(rows[3:], num_visible, self._dtype)
        ids, positions, slots = rows[:3]
        self.cache.begin(slots, first_slot, num_visible)
        options: dict[str, Any] = {"output_hidden_states": True} if with_hidden else {}
        keep = None if keep is None else send(keep, self._device)
        if keep is not None and self._keeps_logits:
            options["logits_to_keep"] = keep
        with torch.inference_mode():
            out = self._model(
                ids[None],
                attention_mask=mask,
                position_ids=positions[None],
                past_key_values=self.cache,
                use_cache=True,
                **options,
            )
            logits: torch.Tensor = out.logits[0]
            if keep is not None and not self._keeps_logits:
                logits = logits[keep]
            if not with_hidden:
                return Output(logits)
            hidden: torch.Tensor = out.hidden_states[-1][0]
            return Output(logits, hidden if keep is None else hidden[keep])

    def move(self, move: Move) -> None:
        """See `Backend.move`."""
        with torch.inference_mode():
            self.cache.move(move)

    def take_over(self, *, timed: bool = True) -> None:
        """Nothing to do: it runs the model as it is."""
        del timed


def no_hidden(model: str, backend: str) -> ModelError:
    """Return what a backend raises that has recorded a pass without its hidden states."""
    return ModelError(f"{model}: the backend {backend} gives no hidden states; use fused")


def _first_of_run(slots: torch.Tensor) -> int | None:
    """Return slots[0] if the slots are consecutive and ascending, else None."""
    array = slots.numpy()
    first = int(array[0])
    if int(array[-1]) - first != len(array) - 1:
        return None
    return first if len(array) < 3 or bool((np.diff(array) == 1).all()) else None
