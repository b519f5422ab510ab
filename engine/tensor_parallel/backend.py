"""Rank 0's backend for a model on several ranks: sends each call to the followers, then runs it.

The parts of the model add up their results themselves (`split.py`), so every rank ends a call with
the same logits. A forward of the transformers model itself, for a check or a measurement, also runs
on all ranks (`lead`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.choice.coupling_on_gpu import Choice
from engine.forward.forward import Backend, Layers, Output, Say, Spans, silent
from engine.tensor_parallel.calls import (
    Chain,
    CopySlots,
    FindNotFinite,
    Forward,
    Loading,
    MakeBackend,
    MoveSlots,
    Plain,
    TakeOver,
    WipeSlots,
)
from engine.tensor_parallel.group import Followers, Rank
from engine.tensor_parallel.split import lowest


class LeadingBackend(Backend):
    """Backend on rank 0 that runs every call on all ranks; see `Backend`."""

    def __init__(
        self,
        followers: Followers,
        rank: Rank,
        device: torch.device,
        call: MakeBackend,
        make: Callable[[], Backend],
    ) -> None:
        """Make the backend on rank 0, and one like it on every follower.

        rank, device  rank 0 and its device
        call  the message by which followers make their backends
        make  makes rank 0's own

        Raises:
            ModelError: as `make`.
        """
        self._followers = followers
        self._rank = rank
        self._device = device
        with followers.together(call):
            self._inner = make()
        self.name = self._inner.name
        self.is_captured = self._inner.is_captured
        self.row_counts = self._inner.row_counts

    @property
    def is_loading(self) -> bool:
        """True while the node loads; setting it sets it on all ranks."""
        return self._inner.is_loading

    @is_loading.setter
    def is_loading(self, is_loading: bool) -> None:
        self._followers.tell(Loading(is_loading))
        self._inner.is_loading = is_loading

    def forward(
        self,
        rows: torch.Tensor,
        spans: Spans,
        *,
        num_visible: int,
        keep: torch.Tensor | None = None,
        layers: Layers = (),
    ) -> Output:
        """Run n rows on all ranks; return logits and features (see `Backend.forward`)."""
        kept = None if keep is None else keep.numpy()
        with self._followers.together(Forward(rows.numpy(), spans, num_visible, kept, layers)):
            out = self._inner.forward(
                rows, spans, num_visible=num_visible, keep=keep, layers=layers
            )
        self.num_uncaptured = self._inner.num_uncaptured
        self.num_late = self._inner.num_late
        return out

    def has_chain(self, num_steps: int, *, num_visible: int, choice: Choice) -> bool:
        """True if `chain` has a recording of `num_steps` steps over `num_visible` slots."""
        return self._inner.has_chain(num_steps, num_visible=num_visible, choice=choice)

    def chain(self, steps: torch.Tensor, *, num_visible: int, choice: Choice) -> torch.Tensor:
        """Run n passes of one row on all ranks, each with the token the last one chose."""
        with self._followers.together(Chain(steps.numpy(), num_visible, choice)):
            return self._inner.chain(steps, num_visible=num_visible, choice=choice)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of every rank's cache (see `Backend.move`)."""
        with self._followers.together(MoveSlots(tuple(sources), tuple(targets))):
            self._inner.move(sources, targets)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy `length` slots of every rank's cache from `source` to `target` (see `Backend`)."""
        with self._followers.together(CopySlots(source, target, length)):
            self._inner.copy(source, target, length)

    def wipe(self, first: int, length: int) -> None:
        """Write zeros to `length` slots of every rank's cache from `first` on."""
        with self._followers.together(WipeSlots(first, length)):
            self._inner.wipe(first, length)

    def not_finite(self, first: int, length: int) -> int | None:
        """Return where NaN or infinity first occurred on any rank; None: nowhere (see `Backend`).

        Every rank looks, because NaN in one rank's heads reaches the other heads, and all rows of
        the pass, only one layer further up.
        """
        with self._followers.together(FindNotFinite(first, length)):
            return lowest(self._inner.not_finite(first, length), self._rank, self._device)

    def take_over(self, *, timed: bool = True, say: Say = silent) -> None:
        """Repack the weights on all ranks (see `Backend.take_over`).

        Rank 0 chooses the forms of attention and norms for all ranks; each rank chooses how its
        matrices are packed, which changes only the last bits.
        """
        with self._followers.together(TakeOver(timed)):
            self._inner.take_over(timed=timed, say=say)


def lead(model: Any, followers: Followers) -> None:
    """Make each forward of rank 0's transformers model itself also run on the followers."""

    def announce(_model: object, ids: tuple[torch.Tensor, ...], _options: object) -> None:
        if not followers.is_told:
            followers.tell(Plain(ids[0].cpu().numpy()))

    model.register_forward_pre_hook(announce, with_kwargs=True)
