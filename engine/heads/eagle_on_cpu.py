"""The layer of an EAGLE head on a CPU, by our own C++: between front and output matrix one call.

A step of a head is small, and comes right after a pass of the target, which has pushed everything
out of the caches. Then some forty small operators of torch take longer than the head's products.

Which slots a row sees is given by numbers, not by a mask: the slots from the lane's lowest on, and
the bits of its tree. A lane in which a slot between others holds nothing cannot be told so
(`sight` returns None); torch's operators compute such a pass.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.forward.cpu_attention import CpuAttention, Sight, cpu_attention, fits
from engine.forward.cpu_layers import CpuLayer, CpuLayers, Rows
from engine.forward.cpu_operators import CpuOperators, operators
from engine.forward.masks import MASK_BITS
from engine.heads.eagle_layer import EagleHead
from engine.layout.attention_windows import AttentionWindow, LayerKinds
from engine.layout.slots import Span
from engine.quantised.cpu_products import TiledProduct
from proto.head_kinds import HeadKind

# Rows come with a lowest slot, as those of a model with a window do, whatever its size.
LOWEST = LayerKinds((AttentionWindow(1 << 40),), of_layers=(0,))

Held = npt.NDArray[np.bool_]


class OwnLayer:
    """The layer of one head, with its cache [2 key heads, slots, dim]."""

    def __init__(
        self,
        head: EagleHead,
        cache: torch.Tensor,
        merged: CpuOperators,
        attention: CpuAttention,
    ) -> None:
        """Take a head all of whose products are our own (`own_layer`)."""
        config, weights = head.config, head.weights
        self._head, self._merged, self._attention = head, merged, attention
        self._is_third = config.kind is HeadKind.EAGLE3
        last = weights.last
        if last is None:  # the output matrix reads the state itself, and no norm of it
            last = torch.ones_like(weights.before_mlp)
        layer = CpuLayer(
            products=(head.qkv, head.out, head.gate_up, head.down),
            norms=(None, weights.before_mlp, last),
            cache=cache,
            kind=0,
        )
        first, scale = weights.before_mlp, config.dim**-0.5  # no pass begins with a norm
        self._layers = CpuLayers(merged, attention, first, (layer,), config.num_heads, scale)
        self._width = (config.num_heads + 2 * config.num_kv_heads) * config.dim

    def sight(self, rows: npt.NDArray[np.int64], spans: Sequence[Span], held: Held) -> Sight | None:
        """Return what the rows of a pass see; None: some slot between others holds nothing.

        rows, spans  as in `Backend.forward`
        held         per slot of the whole cache, whether it holds a row, those of this pass too
        """
        told, start = np.empty((7, rows.shape[1]), dtype=np.int64), 0
        told[:5] = rows
        for span in spans:
            part = told[:, start : start + span.num_rows]
            start += span.num_rows
            first, shown = span.first_slot, int(part[3].max())
            (empty,) = (~held[first : first + shown]).nonzero()
            if len(empty) and empty[-1] + 1 != len(empty):
                return None
            part[5], part[6] = len(empty), part[4]
            if part[4].any():
                part[6] &= _bits_of(held[first + shown : first + shown + MASK_BITS])
        return self._attention.see(torch.from_numpy(told), spans)

    def run(
        self,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        turns: torch.Tensor,
        slots: torch.Tensor,
        sight: Sight,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a pass; return (what the output matrix reads, the rows' states), [n, width] each.

        ids     [n] int64
        hidden  [n, width]: the states before the rows; may be written over
        turns   [2, n, 1, dim]: cosines and sines of the rows' positions
        slots   [n] int64: which keys and values are written to
        """
        head = self._head
        if self._is_third:
            norms = head.weights.of_embedding, head.weights.of_state
            assert norms[0] is not None
            assert norms[1] is not None
            is_normed = head.config.residual_is_normed
            entering = self._merged.enter_head(
                *(head.embeddings, ids, (norms[0], norms[1]), hidden), residual_is_normed=is_normed
            )
        else:
            entering, _ = head.front(torch.nn.functional.embedding(ids, head.embeddings), hidden)
            hidden = entering.clone()
        queries = hidden.new_empty(len(hidden), self._width)
        rows = Rows(hidden, turns[0], turns[1], slots, queries, sight)
        normed = self._layers.run_entered(rows, entering)
        if not self._is_third:
            return hidden, hidden
        return normed, normed if head.config.output_is_normed else hidden

    def note(self, rows: torch.Tensor) -> None:
        """Note rows [5, n], as in `Backend.forward`, that were computed otherwise."""
        self._attention.note(rows[2], rows[1])

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Note that slots were copied, all read before any was written; int64 [n] each."""
        self._attention.move(sources, targets)

    def copy(self, source: int, target: int, length: int) -> None:
        """Note that `length` slots from `source` on were copied to `target` on."""
        self._attention.copy(source, target, length)


def own_layer(head: EagleHead, cache: torch.Tensor) -> OwnLayer | None:
    """Return a head's layer by our C++; None: not on this device, or not for these numbers.

    cache  [2 key heads, slots of all lanes, dim]
    """
    products = head.qkv, head.out, head.gate_up, head.down
    if cache.device.type != "cpu" or not all(isinstance(one, TiledProduct) for one in products):
        return None
    dtype, config = cache.dtype, head.config
    merged = operators(dtype, config.epsilon)
    attention = cpu_attention(dtype, cache.shape[1], LOWEST)
    if merged is None or attention is None or not fits(dtype, config.dim):
        return None
    return OwnLayer(head, cache, merged, attention)


def _bits_of(held: Held) -> np.int64:
    """Return which of at most 64 slots hold a row, as bits; the first slot is bit 0."""
    packed = np.zeros(MASK_BITS // 8, dtype=np.uint8)
    bits = np.packbits(held, bitorder="little")
    packed[: len(bits)] = bits
    found: np.int64 = packed.view(np.int64)[0]
    return found
