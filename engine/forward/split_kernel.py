"""Our own kernel for attention split over the keys, with the mask of a tree, in Triton.

Each thread block computes attention of the queries of one key head over a share of the slots that
its rows may see (`split_kernel_in_triton.part`). It leaves the weighted sum of the values, the
largest score, and the sum of the weights. A second kernel (`join`) adds up the shares and writes
the outputs row by row, in the order that the output matrix takes. A share beyond what is visible
costs almost nothing, so one recording serves every length. Arithmetic is in float32; the weights of
the values are rounded to the model's dtype (the method: Flash-Decoding, Dao et al., 2023).

Triton is only imported when a program is made. It comes with torch for GPUs, and not with torch for
CPUs.
"""

from dataclasses import dataclass

import torch

from engine.forward.masks import MASK_BITS
from engine.forward.split_attention import SplitAttention, Visible

_SLOTS = 64  # slots that a thread block reads at a time
_MOST_QUERIES = 64  # queries of a thread block; more are divided among several
_FEWEST_QUERIES = 16  # the smallest size of Triton's matrix product
_BLOCKS = 256  # thread blocks that a call aims at: about two for each multiprocessor
_MOST_SHARES = 32  # of the keys


@dataclass(frozen=True, slots=True)
class KernelVisible(Visible):
    """Which slots the queries see; tensors on their device.

    words        [2 or 3, lanes * n] int64: what each row sees in its lane (`masks.words_of`)
    first_slots  [lanes] int64: where the lanes begin in the whole cache
    """

    words: torch.Tensor
    first_slots: torch.Tensor


class SplitKernel(SplitAttention):
    """Attention split over the keys by our own kernel; see `SplitAttention`."""

    name = "our kernel"

    def takes(self, num_rows: int) -> bool:
        """True: it takes any number of rows."""
        return num_rows > 0

    def see(self, words: torch.Tensor, first_slots: torch.Tensor) -> KernelVisible:
        """Return which slots the queries see; arguments as in `SplitAttention.see`."""
        return KernelVisible(words.contiguous(), first_slots)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: Visible,
        scale: float,
    ) -> torch.Tensor:
        """Run attention split over the keys; arguments and result as in `SplitAttention.attend`."""
        from engine.forward import split_kernel_in_triton as kernels

        assert isinstance(visible, KernelVisible)
        query = query.contiguous()
        num_lanes, num_heads, num_queries, dim = query.shape
        num_rows = num_queries // self._group
        size = max(_FEWEST_QUERIES, min(_power_of_two(num_queries), _MOST_QUERIES))
        num_tiles = -(-num_queries // size)
        num_shares = _shares(num_lanes * num_heads)
        sums = query.new_empty(
            (num_lanes, num_heads, num_shares, num_queries, dim), dtype=torch.float32
        )
        # The largest score and the sum of the weights, of each share.
        about = sums.new_empty((2, num_lanes, num_heads, num_shares, num_queries))
        out = query.new_empty((num_lanes, num_rows, num_heads, self._group, dim))
        padded = max(16, _power_of_two(dim))
        is_half = query.dtype != torch.float32
        kernels.part[num_shares, num_heads * num_tiles, num_lanes](
            *(query, keys, values, visible.words, visible.first_slots, sums, about),
            *(num_rows, num_heads, num_lanes, self._num_slots),
            keys.stride(1),
            scale * 1.4426950408889634,  # the kernels compute powers of two, not of e
            GROUP=self._group,
            DIM=dim,
            PADDED_DIM=padded,
            QUERIES=size,
            SLOTS=_SLOTS,
            BITS=MASK_BITS,
            HAS_WINDOW=len(visible.words) > 2,
            STAGES=3 if is_half else 1,
            PRECISION="tf32" if is_half else "ieee",
            num_warps=4,
        )
        kernels.join[num_queries, num_heads, num_lanes](
            *(sums, about, out, num_rows, num_heads, num_lanes),
            GROUP=self._group,
            DIM=dim,
            PADDED_DIM=padded,
            SHARES=num_shares,
            num_warps=4,
        )
        return out.transpose(1, 2)


def _shares(num_heads: int) -> int:
    """Return among how many thread blocks the keys of each of `num_heads` heads are divided."""
    return max(1, min(_MOST_SHARES, _power_of_two(-(-_BLOCKS // num_heads))))


def _power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()
