"""Attention masks: which slots each row of a pass sees, as integers and as an additive mask.

A mask goes through the engine as two integers per row (`as_words`), and two more for each attention
window of the model (`window_words`). On a CPU the numbers that are added to the attention scores
are kept from pass to pass and only updated (`Masks`); on a GPU they are computed there
(`from_words`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.device import send
from engine.layout.attention_windows import AttentionWindow, LayerKinds
from engine.layout.slots import SLOT_STEP

Slots = npt.NDArray[np.int64]

# A mask is added to the attention scores. A hidden slot gets the type's lowest finite number, as in
# transformers: the softmax makes exactly zero of it, and a row that sees nothing gives no NaN.
MASK_BITS = 64
_ALL_BITS = (1 << MASK_BITS) - 1
_LARGEST = (1 << MASK_BITS - 1) - 1
_BITS = {torch.float32: np.int32, torch.bfloat16: np.int16, torch.float16: np.int16}
_MOST_MADE = 32
MOST_AT_ONCE = 1 << 21  # elements of a mask that are made together: 25 bytes each, 50 MB
_Made = tuple[torch.Tensor, Any, list[tuple[int, int]], list[tuple[int, int]]]
_NUM_FIRST = 3  # of a pass's integers: token, position and slot of a row; what it sees follows


class Masks:
    """Builds additive masks [1, 1, n, S] on the CPU, changing only what differs from the last one.

    From one decode pass to the next the prefix grows by a few slots; everything before it stays
    visible and everything after the tree stays hidden. So the work does not grow with the context.
    An attention window moves on by as few slots, and only those between are written.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        lowest = torch.tensor(torch.finfo(dtype).min, dtype=dtype)
        integers = torch.from_numpy(np.zeros((), dtype=_BITS[dtype])).dtype
        self._hidden = lowest.view(integers).numpy()[()]
        self._lookup = np.array([self._hidden, 0], dtype=_BITS[dtype])
        # Rows of each lane -> (the mask, the same memory as integers, and per lane two slots as
        # last written: all rows see the slots below the first, no row sees those from the second
        # on; and two of the window: no row sees the slots below the first, all rows see those from
        # the second on). All masks are for `_num_visible` slots.
        self._made: dict[tuple[int, ...], _Made] = {}
        self._num_visible = 0

    def build(
        self,
        rows: torch.Tensor,
        num_visible: int,
        counts: tuple[int, ...] = (),
        *,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the mask [1, 1, n, num_visible] of a pass, valid until the next call.

        rows    [5 or more, n] int64 as in `Backend.forward`: decode rows, with the same prefix
                length in each lane, or one causal chunk of a prompt
        counts  number of rows of each lane; (): there is one lane
        window  the mask is for layers with this attention window (its index in the model's
                windows), the same in all calls; None: for full attention
        """
        integers = rows.numpy()
        shown, bits = integers[_NUM_FIRST : _NUM_FIRST + 2]
        lowest = None
        if window is not None:
            lowest, bits = integers[_first_of(window) : _first_of(window) + 2]
        counts = counts or (len(bits),)
        if len(counts) == 1 < len(bits) and shown[0] != shown[-1]:
            return self._causal(shown, num_visible, lowest)
        if num_visible != self._num_visible or len(self._made) > _MOST_MADE:
            self._made.clear()
            self._num_visible = num_visible
        if counts not in self._made:
            self._made[counts] = self._allocate(counts, num_visible)
        mask, cells, written, hidden = self._made[counts]
        start = 0
        for number, count in enumerate(counts):
            of_lane = slice(start, start + count)
            written[number] = self._patch(
                cells[of_lane], written[number], int(shown[start]), bits[of_lane]
            )
            if lowest is not None:
                hidden[number] = self._hide(
                    cells[of_lane], hidden[number], written[number][0], lowest[of_lane]
                )
            start += count
        return mask

    def _patch(
        self, cells: Any, written: tuple[int, int], prefix_len: int, bits: Slots
    ) -> tuple[int, int]:
        """Update the mask rows `cells` of one lane in place; return the new `written`.

        written  (slots below it are visible to all rows, slots from it on are hidden from all)
        bits     [n] int64: per row, the visible slots after the prefix
        """
        any_bits = int(bits[0] if len(bits) == 1 else np.bitwise_or.reduce(bits)) & _ALL_BITS
        end = min(prefix_len + any_bits.bit_length(), cells.shape[1])
        # One row that sees all up to some slot is the usual step of a drafter.
        is_run = len(bits) == 1 and not any_bits & (any_bits + 1)
        seen_by_all = end if is_run else prefix_len
        if seen_by_all > written[0]:
            cells[:, written[0] : seen_by_all] = 0
        if end < written[1]:
            cells[:, end : written[1]] = self._hidden
        if end > seen_by_all:
            cells[:, seen_by_all:end] = self._lookup[_unpack(bits)[:, : end - seen_by_all]]
        return seen_by_all, end

    def _hide(
        self, cells: Any, hidden: tuple[int, int], seen_by_all: int, lowest: Slots
    ) -> tuple[int, int]:
        """Hide what lies before each row's window in the rows `cells` of one lane; in place.

        hidden  as last written (no row sees the slots below the first, all rows see those from
                the second on up to `seen_by_all`); the new ones are returned
        seen_by_all  all rows would see the slots below it without a window
        lowest  [n] int64: per row, the lowest slot that it sees, at most the prefix's length
        """
        first, last = int(lowest.min()), int(lowest.max())
        start, end = min(hidden[0], first), min(max(hidden[1], last), seen_by_all)
        if start < end:
            visible = np.arange(start, end) >= lowest[:, None]
            cells[:, start:end] = self._lookup[visible.view(np.uint8)]
        return first, last

    def _causal(self, shown: Slots, num_visible: int, lowest: Slots | None) -> torch.Tensor:
        """Return the mask of a causal chunk: row j sees the slots [lowest[j] or 0, shown[j])."""
        slots = np.arange(num_visible)
        visible = slots < shown[:, None]
        if lowest is not None:
            visible &= slots >= lowest[:, None]
        cells = self._lookup[visible.view(np.uint8)]
        return torch.from_numpy(cells).view(self._dtype)[None, None]

    def _allocate(self, counts: tuple[int, ...], num_visible: int) -> _Made:
        """Return a new mask that hides everything, for so many rows of each lane."""
        cells = np.full((sum(counts), num_visible), self._hidden, dtype=_BITS[self._dtype])
        mask = torch.from_numpy(cells).view(self._dtype)[None, None]
        return mask, cells, [(0, 0)] * len(counts), [(0, 0)] * len(counts)


class KindMasks:
    """Builds the masks of a pass for each kind of a model's layers, on its device.

    are_cut  True: the masks of windows leave out slots that no row of the pass sees, so that
             attention does not read them
    """

    def __init__(self, kinds: LayerKinds, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._is_on_cpu = device.type == "cpu"
        self._is_plain = kinds.seen == (None,)
        self._kinds = [(window, Masks(dtype)) for window in kinds.numbers]
        self.are_cut = False

    def build(
        self, rows: torch.Tensor, num_visible: int, counts: tuple[int, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the rows on the device, and per kind of layer the mask [1, 1, n, slots seen].

        The slots that a kind sees are the last of the `num_visible` ones: a multiple of `SLOT_STEP`
        at the beginning may be left out. The masks are valid until the next call.

        rows, num_visible, counts  as for `Masks.build`
        """
        is_on_cpu = self._is_on_cpu
        if is_on_cpu and self._is_plain:
            return rows, [self._kinds[0][1].build(rows, num_visible, counts)]
        there = rows if is_on_cpu else send(rows, self._device)
        masks = []
        for window, made in self._kinds:
            if is_on_cpu:
                mask = made.build(rows, num_visible, counts, window=window)
            else:
                mask = from_words(words_of(there, window), num_visible, self._dtype)
            if window is not None and self.are_cut and len(counts) == 1:
                lowest = int(rows[_first_of(window)].min())
                mask = mask[..., lowest // SLOT_STEP * SLOT_STEP :]
            masks.append(mask)
        return there, masks


def as_words(
    slots: Sequence[int], prefix_len: int, masks: Sequence[int] | None
) -> tuple[Sequence[int], Sequence[int]]:
    """Return what each of n rows sees, as two integers (words): prefix length, 64 bits (signed).

    Row j sees the slots [0, words[0][j]), and slot words[0][j] + t if bit t of words[1][j] is set.

    slots       [n]: the slot that each row's key and value are written to
    prefix_len  every row sees the slots [0, prefix_len)
    masks       [n]: row j also sees slot prefix_len + t if bit t of masks[j] is set; None means
                causal: row j sees [0, slots[j]]
    """
    if masks is None:
        return [slot + 1 for slot in slots], (0,) * len(slots)
    return (prefix_len,) * len(masks), [_signed(mask) for mask in masks]


def _signed(mask: int) -> int:
    """Return 64 bits as a signed integer."""
    return mask if mask <= _LARGEST else mask - (1 << MASK_BITS)


def window_words(
    positions: Sequence[int],
    shown: Sequence[int],
    bits: Sequence[int],
    window: AttentionWindow,
    near: Sequence[int] | None,
) -> tuple[Sequence[int], Sequence[int]]:
    """Return what n rows see in layers with an attention window, as two integers.

    They are the lowest slot that a row sees, at most the length of the prefix; and 64 bits (signed)
    for the slots after the prefix, as in `as_words`.

    positions  [n]: the rows' positions
    shown, bits  [n] each: the words of full attention (`as_words`)
    near       [n]: `Feed.near` of the window; None: it hides none of the slots after the prefix
    """
    lowest = [min(window.lowest(p), end) for p, end in zip(positions, shown, strict=True)]
    return lowest, bits if near is None else [_signed(mask) for mask in near]


def words_of(rows: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return what the rows of a pass see, in the form that `from_words` takes.

    rows    [5 or more, n] int64 as in `Backend.forward`, on any device
    window  index of an attention window of the model; None: full attention
    """
    if window is None:
        return rows[_NUM_FIRST : _NUM_FIRST + 2]
    lowest, bits = rows[_first_of(window) : _first_of(window) + 2]
    return torch.stack((rows[_NUM_FIRST], bits, lowest))


def _first_of(window: int) -> int:
    """Return which of a pass's integers are the first of an attention window's two."""
    return _NUM_FIRST + 2 + 2 * window


def lowest_slots(shown: torch.Tensor, window: AttentionWindow) -> torch.Tensor:
    """Return the lowest slot that rows right after a prefix see; `shown` int64: its lengths."""
    if window.is_chunk:
        return shown // window.size * window.size
    return (shown - (window.size - 1)).clamp(min=0)


def from_words(words: torch.Tensor, num_visible: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask [1, 1, n, num_visible] of `words` [2 or 3, n] int64.

    The third word, if there is one, is the lowest slot that a row sees. The mask is on the device
    of the words. It is computed a few rows at a time, because the intermediate results take some
    twelve times the memory of the mask.
    """
    num_rows = words.shape[1]
    mask = torch.zeros(num_rows, num_visible, dtype=dtype, device=words.device)
    step = max(1, MOST_AT_ONCE // num_visible)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        mask[rows].masked_fill_(_is_hidden(words[:, rows], num_visible), torch.finfo(dtype).min)
    return mask[None, None]


def _is_hidden(words: torch.Tensor, num_visible: int) -> torch.Tensor:
    """Return [n, num_visible] bool: True where a row of `words` [2 or 3, n] sees no slot."""
    shown, bits, *lowest = words[:, :, None]
    slots = torch.arange(num_visible, device=words.device)
    behind = slots - shown
    in_tree = (bits >> behind.clamp(0, MASK_BITS - 1)) & (behind < MASK_BITS)
    is_hidden: torch.Tensor = (behind >= 0) & (in_tree & 1 == 0)
    return is_hidden | (slots < lowest[0]) if lowest else is_hidden


def _unpack(bits: Slots) -> npt.NDArray[np.uint8]:
    """Return [n, 64] uint8: element [j, t] is bit t of bits[j]."""
    words = bits.astype("<i8").view(np.uint8).reshape(len(bits), 8)
    return np.unpackbits(words, axis=1, bitorder="little")
