"""Runs a target's layer for multi-token prediction as `EagleExecutor` runs an EAGLE head.

Which rows start from which hidden state, and which slots hold anything, is the same. The layer is
transformers' module, so its keys and values lie in a `SlotCache` of one layer, and rows of several
texts run one text after another.
"""

import torch

from engine.forward.cache_tensors import SlotCache
from engine.heads.eagle import EagleExecutor, Wave
from engine.heads.mtp import MtpHead


class MtpExecutor(EagleExecutor):
    """Runs an MTP layer with a cache of `num_lanes` lanes (one per text) of `capacity` slots."""

    backend = "mtp"
    _mtp: MtpHead
    _keys: SlotCache

    def _allocate_keys(self) -> None:
        """Allocate keys and values."""
        assert isinstance(self._head, MtpHead)
        self._mtp, self._own = self._head, None  # there is no form of our own
        with torch.inference_mode():
            self._keys = SlotCache(self._mtp.layer, self.lanes.total, self._device)

    def _compute(self, wave: Wave, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run a wave's rows, write their keys, values and states; return the states [n, width]."""
        ids, positions, slots = rows.unbind()[:3]
        entering = self._mtp.enter(ids, self._states_before(wave))
        counts = [span.num_rows for span in wave.spans]
        num_visible, made = mask.shape[3], []
        if (window := self._mtp.layer.window) is not None:
            # Among the drafts a slot is no position. In a window that is shorter than the tree, a
            # row may see too few or too many of them; that costs drafts alone.
            places = torch.arange(num_visible, device=self._device)
            mask = mask.masked_fill(places <= positions[:, None] - window, self._lowest)
        for span, row, position, slot, seen in zip(
            wave.spans,
            torch.split(entering, counts),
            torch.split(positions, counts),
            torch.split(slots, counts),
            torch.split(mask, counts, 2),
            strict=True,
        ):
            self._keys.begin(slot, None, span.first_slot + num_visible, (num_visible,))
            made.append(self._mtp.layer.run(row, position, seen, self._keys))
        states = made[0] if len(made) == 1 else torch.cat(made)
        self._states.index_copy_(0, slots, states)
        return states

    def _move_keys(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy keys and values between slots, all reads before any write."""
        self._keys.move_there(sources, targets)

    def _copy_keys(self, source: int, target: int, length: int) -> None:
        """Copy keys and values of `length` slots from `source` on to those from `target` on."""
        self._keys.copy(source, target, length)

    def _wipe_keys(self, first: int, length: int) -> None:
        """Write zeros to keys and values of `length` slots from `first` on."""
        self._keys.wipe(first, length)

    def _free_keys(self) -> None:
        """Free the memory of keys and values."""
        del self._keys
