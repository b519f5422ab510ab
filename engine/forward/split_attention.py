"""Attention split over the keys, for GPUs: what its two implementations share, and their check.

The usual kernel uses one thread block per lane and key head, however long the text is. Attention
that is split over the keys uses as many as the device can run at once, each for a share of the
visible keys. What is visible is given by numbers on the device: the two words of each row
(`masks.as_words`). So one program serves every length, and its time depends on what the rows see,
not on the size of the cache. All lanes are one long run of slots, so a program serves any lanes.

`split_kernel.py` is our own kernel, `flex_attention.py` torch's FlexAttention. Before one is used
for passes of a shape, its results on random keys are compared with attention under a mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch

from engine.checkpoint.files import one_line
from engine.errors import ModelError
from engine.forward.forward import Shape
from engine.forward.masks import MASK_BITS, from_words, lowest_slots
from engine.forward.operators import side_by_side
from engine.layout.attention_windows import FULL, AttentionWindow, LayerKinds

# Largest relative difference from attention under a mask: both sum in float32, in another order,
# and round to the dtype once.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
# Errors of torch.compile and of Triton if they, or a compiler that they call, fail.
_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    ImportError,
    OSError,
)


class Visible:
    """Which slots the queries of one call see; each implementation has a form of its own."""


class SplitAttention:
    """Attention split over the keys, for one model and cache layout; see the subclasses.

    Lanes have `num_slots` slots, and `group` query heads share a key head.

    made  shapes of passes for which it was compiled and checked
    """

    name = ""

    def __init__(
        self, num_slots: int, group: int, *, num_lanes: int = 1, kinds: LayerKinds = FULL
    ) -> None:
        del num_lanes  # FlexAttention counts the blocks of all lanes
        self._num_slots = num_slots
        self._group = group
        self._kinds = kinds
        self.made: set[Shape] = set()

    def takes(self, num_rows: int) -> bool:
        """True if a pass of `num_rows` rows per lane can be split over the keys."""
        raise NotImplementedError

    def see(self, words: torch.Tensor, first_slots: torch.Tensor) -> Visible:
        """Return which slots the queries see.

        words        [2 or 3, lanes * n] int64: what each row sees in its lane (`masks.words_of`)
        first_slots  [lanes] int64: where the lanes begin in the whole cache
        """
        raise NotImplementedError

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: Visible,
        scale: float,
    ) -> torch.Tensor:
        """Run attention split over the keys; return the outputs.

        query         [lanes, kv_heads, n * group, dim]: the query heads of a group as rows
        keys, values  [1, kv_heads, slots of all lanes, dim]

        The outputs can be viewed as [lanes, kv_heads, n, group, dim].
        """
        raise NotImplementedError

    def make(self, shape: Shape, keys: torch.Tensor, values: torch.Tensor, scale: float) -> None:
        """Compile the program for passes of `shape`, and check it against attention with a mask.

        keys, values  [1, kv_heads, slots of all lanes, dim]: any numbers; they are not changed

        Raises:
            ModelError: it cannot be compiled here, or computes other numbers.
        """
        try:
            with self._compiling():
                error = self._error(shape, keys, values, scale)
        except _FAILURES as failure:
            raise ModelError(f"{self.name} cannot be compiled ({one_line(failure)})") from failure
        if not error <= _TOLERANCES[keys.dtype]:
            raise ModelError(f"{self.name} gives other numbers (relative error {error:.1e})")
        self.made.add(shape)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Surround what may compile a program."""
        yield

    def _error(self, shape: Shape, keys: torch.Tensor, values: torch.Tensor, scale: float) -> float:
        """Return the largest difference from attention with a mask, relative to the largest output.

        Runs in the last lanes, in descending order, so that a mix-up of lanes would show.
        """
        num_lanes, num_rows = shape
        worst = 0.0
        size = num_lanes, keys.shape[1], num_rows * self._group, keys.shape[3]
        random = torch.Generator().manual_seed(num_rows)
        query = torch.randn(size, generator=random).to(keys)
        lanes = torch.arange(keys.shape[2] // self._num_slots, device=keys.device).flip(0)
        lanes = lanes[:num_lanes]
        k, v = (
            part[0].view(keys.shape[1], -1, self._num_slots, keys.shape[3]).transpose(0, 1)[lanes]
            for part in (keys, values)
        )
        shares = 0.0, 0.5, 1.0  # of the lane, that the prefix fills
        for share, kind in product(shares, self._kinds.seen):
            words = self._random_words(shape, share, random, kind).to(keys.device)
            visible = self.see(words, lanes * self._num_slots)
            got = self.attend(query, keys, values, visible, scale).reshape(size)
            mask = from_words(words, self._num_slots, keys.dtype).view(num_lanes, 1, num_rows, -1)
            mask = mask.repeat_interleave(self._group, dim=2)
            want = side_by_side(query, k, v, mask, scale)
            worst = max(worst, float((got - want).abs().amax() / want.abs().amax()))
        return worst

    def _random_words(
        self,
        shape: Shape,
        share: float,
        random: torch.Generator,
        kind: AttentionWindow | None,
    ) -> torch.Tensor:
        """Return random words [2 or 3, lanes * n]: trees after prefixes that differ by a few slots.

        kind  the attention window of the layers; None: full attention
        """
        num_lanes, num_rows = shape
        longest = max(self._num_slots - MASK_BITS, 1)
        prefix = 1 + int(share * (longest - 1)) - torch.arange(num_lanes) % 3
        shown = prefix.clamp(1, longest).repeat_interleave(num_rows)
        largest = torch.iinfo(torch.int64).max
        bits = torch.randint(-largest, largest, (num_lanes * num_rows,), generator=random)
        if kind is None:
            return torch.stack((shown, bits))
        # In a window a row sees at least itself: here the first slot after the prefix.
        return torch.stack((shown, bits | 1, lowest_slots(shown, kind)))
