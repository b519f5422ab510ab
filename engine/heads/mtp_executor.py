"""Runs a target's layers for multi-token prediction as `EagleExecutor` runs an EAGLE head.

Which rows start from which hidden state, and which slots hold anything, is the same, for each layer
of several (`waves.py`). A layer is transformers' module, so keys and values lie in a `SlotCache`,
and rows of several texts run one text after another.
"""

import numpy as np
import torch

from engine.device import send
from engine.forward.cache_tensors import SlotCache
from engine.heads.eagle import EagleExecutor
from engine.heads.loaded import LoadedHead
from engine.heads.mtp import MtpHead
from engine.heads.waves import Integers, Wave


class MtpExecutor(EagleExecutor):
    """Runs MTP layers with a cache of `num_lanes` lanes (one per text) of `capacity` slots."""

    backend = "mtp"
    _mtp: MtpHead
    _keys: SlotCache

    def __init__(self, loaded: LoadedHead, capacity: int, *, num_lanes: int = 1) -> None:
        """Allocate the cache; as `EagleExecutor`."""
        assert isinstance(loaded.module, MtpHead)
        self._mtp = loaded.module
        self._num_layers = len(loaded.module.layers)
        super().__init__(loaded, capacity, num_lanes=num_lanes)

    def _allocate_keys(self) -> None:
        """Allocate keys and values."""
        self._own = None  # there is no form of our own
        with torch.inference_mode():
            self._keys = SlotCache(self._mtp.layers, self.lanes.total, self._device)

    def _hide_empty(self, mask: torch.Tensor, wave: Wave) -> torch.Tensor:
        """Return the mask as it is: each layer has empty slots of its own."""
        del wave
        return mask

    def _compute(self, wave: Wave, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run a wave's rows, write their keys, values and states; return the states [n, width].

        A layer runs the rows that it can (`Wave.layers`), after all rows of the layer before it.
        The states are those of the first layer that has run a row.
        """
        num_layers, width = self._num_layers, self._mtp.config.width
        states = self._states.view(-1, width)  # of slot s and layer k: s * num_layers + k
        slots, runs = rows[2], np.array(wave.layers)
        made = torch.empty(0)
        for number in range(num_layers):
            run = np.flatnonzero(runs >> number & 1)
            if not len(run):
                continue
            if number == 0:
                # Of several layers the first one runs just the rows that have a feature.
                before = self._states_before(wave) if num_layers == 1 else self._given(wave)
            else:
                sources = np.array(wave.sources)[run] if number == num_layers - 1 else number - 1
                index = torch.from_numpy(wave.before[run] * num_layers + sources)
                before = states.index_select(0, send(index, self._device))
            some = None if len(run) == len(runs) else send(torch.from_numpy(run), self._device)
            made = self._run_layer(number, wave, rows, mask, (run, some), before)
            own = slots if some is None else slots[some]
            states.index_copy_(0, own * num_layers + number, made)
        if num_layers == 1:
            return made
        # The lowest bit that is set.
        lowest = np.log2(runs & -runs).astype(np.int64)
        where = slots * num_layers + send(torch.from_numpy(lowest), self._device)
        return states.index_select(0, where)

    def _run_layer(
        self,
        number: int,
        wave: Wave,
        rows: torch.Tensor,
        mask: torch.Tensor,
        run: tuple[Integers, torch.Tensor | None],
        before: torch.Tensor,
    ) -> torch.Tensor:
        """Run some rows of a wave through a layer; return their states [k, width].

        run     which rows, ascending: on the host, and on the device (None: all)
        before  [k, width]: the states that they start from
        """
        on_host, some = run
        if some is not None:
            rows, mask = rows[:, some], mask[:, :, some]
        ids, positions, slots = rows.unbind()[:3]
        layer, num_visible = self._mtp.layers[number], mask.shape[3]
        if (window := layer.window) is not None:
            # Among the drafts a slot is no position. In a window that is shorter than the tree, a
            # row may see too few or too many of them; that costs drafts alone.
            places = torch.arange(num_visible, device=self._device)
            mask = mask.masked_fill(places <= positions[:, None] - window, self._lowest)
        entering, made, start, first = self._mtp.enter(number, ids, before), [], 0, 0
        for span in wave.spans:
            first += span.num_rows
            end = int(np.searchsorted(on_host, first))
            if end == start:
                continue
            mine = slice(start, end)
            held = self._hidden[number].narrow(0, span.first_slot, num_visible)
            seen = torch.minimum(mask[:, :, mine], held)
            total = span.first_slot + num_visible
            self._keys.begin(slots[mine], None, total, (num_visible,))
            made.append(layer.run(entering[mine], positions[mine], seen, self._keys))
            start = end
        return made[0] if len(made) == 1 else torch.cat(made)

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
