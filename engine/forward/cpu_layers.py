"""A model's layers on a CPU, with operators and attention of our own: in one call, or step by step.

While a pass reads its weights from memory, they push everything else out of the caches, also what
Python needs for a call: a small operator that takes 7 us in a loop takes 20 in a pass. So where all
products are our own, all layers are one call. Either way the numbers are the same.

Knows the order of a layer's steps (also in cpu_operators.cpp) and the calls of the functions there;
not the model's classes.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.cpu_library import library
from engine.forward.cpu_attention import NAMES, CpuAttention, Heads, Sight
from engine.forward.cpu_operators import CpuOperators, Sizes
from engine.forward.forward import LAST, Layers
from engine.forward.operators import Product
from engine.quantised.cpu_products import TiledProduct

logger = logging.getLogger(__name__)

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_LINE = 64  # bytes: where memory of a pass begins
_CHECKED_ROWS = 4  # of the pass by whose logits operators are checked

Result = tuple[torch.Tensor, dict[int, torch.Tensor]]
"""(the last norm's outputs [n, hidden], layer -> its hidden states if they are wanted)"""


@dataclass(frozen=True, slots=True)
class CpuLayer:
    """One decoder layer: its products, the weights of its norms, its cache.

    products  of queries, keys and values; of attention's outputs; of gates and ups; and the last
    norms     the weights of three: [heads + 2 kv_heads, dim] for queries and keys, ones for values
              (None: it has none); [hidden] before the feed-forward block; [hidden] after the layer,
              the next layer's first or the model's last
    cache     [2 kv_heads, slots, dim]: keys, then values
    kind      index of what it sees (`Sight.look`)
    """

    products: tuple[Product, Product, Product, Product]
    norms: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]
    cache: torch.Tensor
    kind: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a pass.

    hidden    [n, hidden]: embeddings; changed in place
    cos, sin  [n, 1, dim]: of each row's position; sin is negative in its first half
    slots     [n] int64: the slots that keys and values are written to
    queries   [n, (heads + 2 kv_heads) * dim]: memory, of which the queries are written
    sight     what the rows see
    """

    hidden: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    queries: torch.Tensor
    sight: Sight


class CpuLayers:
    """All layers of a model, for numbers of one type."""

    def __init__(
        self,
        merged: CpuOperators,
        attention: CpuAttention,
        first_norm: torch.Tensor,
        layers: Sequence[CpuLayer],
        num_heads: int,
        scale: float,
    ) -> None:
        """Take operators, attention, the weight [hidden] of the first norm, and the layers.

        num_heads, scale  number of query heads; factor of attention's scores
        """
        self.attention = attention
        self._merged = merged
        self._first_norm = first_norm
        self._layers = layers
        twice_kv_heads, num_slots, dim = layers[0].cache.shape
        self._heads = Heads(num_heads, twice_kv_heads // 2, dim, num_slots)
        self._scale = scale
        ours = [found for layer in layers if (found := _Layer.of(layer)) is not None]
        self._ours = (_Layer * len(ours))(*ours)
        self._run_ours = self._one_call()

    @property
    def is_one_call(self) -> bool:
        """True if all products are our own, so that all layers are one call."""
        return self._run_ours is not None

    def _one_call(self) -> Callable[..., None] | None:
        """Return the function that runs layers; None: some product is not our own."""
        if len(self._ours) < len(self._layers):
            return None
        return _function(self._layers[0].cache.dtype)

    def _looks(self, rows: Rows) -> Sequence[Any]:
        """Return how attention of each kind of layer is computed in a pass."""
        kinds = range(1 + max(layer.kind for layer in self._layers))
        about = self._heads, rows.queries.shape[1], self._scale
        return [rows.sight.look(kind, *about) for kind in kinds]

    def run_entered(self, rows: Rows, entering: torch.Tensor) -> torch.Tensor:
        """Run a pass in one call, from what goes into the first layer; return the last norm.

        entering  [n, inputs of the first product], written over; afterwards `rows.hidden` is the
                  last layer's output
        """
        assert self._run_ours is not None, "a product is not our own"
        looks, epsilon = self._looks(rows), self._merged.epsilon
        structure = _Structure(self._layers[0], rows, looks, entering, epsilon)
        self._run_ours(ctypes.addressof(self._ours), 0, len(self._layers), structure.address)
        return entering.flatten()[: rows.hidden.numel()].view_as(rows.hidden)

    def run(self, rows: Rows, wanted: Layers) -> Result:
        """Run a pass; `wanted` are the layers whose inputs are kept."""
        normed = self._merged.add_and_norm(rows.hidden, None, self._first_norm)
        looks = self._looks(rows)
        steps: _OneByOne | _Together
        if self._run_ours is None:
            steps = _OneByOne(self._merged, self.attention, self._layers, rows, looks, normed)
        else:
            structure = _Structure(self._layers[0], rows, looks, normed, self._merged.epsilon)
            steps = _Together(self._run_ours, self._ours, structure)
        states: dict[int, torch.Tensor] = {}
        first, last = 0, len(self._layers)
        for number in (*sorted(set(wanted) & set(range(last))), last):
            normed = steps.run(first, number)
            if number in wanted:
                states[number] = rows.hidden.clone()  # `hidden` changes in place
            first = number
        if LAST in wanted:
            states[LAST] = normed
        return normed, states


def checked(
    layers: CpuLayers,
    run: Callable[[CpuLayers | None, int], torch.Tensor],
    tolerance: float,
    most_rows: int,
) -> CpuLayers | None:
    """Return the layers; None: passes with them have other logits than with single operators.

    run        function (layers, or None for single operators; number of rows) -> logits of a pass
    tolerance  largest difference, relative to the largest logit
    most_rows  that `run` can run
    """
    num_rows = min(_CHECKED_ROWS, most_rows)
    want = run(None, num_rows)
    error = (run(layers, num_rows) - want).abs().max() / want.abs().max()
    if not error <= tolerance:  # nor if it is NaN
        logger.warning("our own operators give other logits (%.2g off): not used", error)
        return None
    return layers


class _OneByOne:
    """The steps of a pass with any products."""

    def __init__(
        self,
        merged: CpuOperators,
        attention: CpuAttention,
        layers: Sequence[CpuLayer],
        rows: Rows,
        looks: Sequence[Any],
        normed: torch.Tensor,
    ) -> None:
        self._merged, self._attention, self._layers = merged, attention, layers
        self._rows, self._looks, self._normed = rows, looks, normed

    def run(self, first: int, last: int) -> torch.Tensor:
        """Run the layers from `first` on that are before `last`; return the norm after them."""
        for layer in self._layers[first:last]:
            self._normed = self._after_attention(layer, self._attended(layer))
        return self._normed

    def _attended(self, layer: CpuLayer) -> torch.Tensor:
        """Write a layer's queries, keys and values; return the outputs of attention."""
        rows = self._rows
        qkv, head_norm = layer.products[0](self._normed), layer.norms[0]
        self._merged.turn_and_write(
            *(qkv, head_norm, rows.cos, rows.sin, rows.slots, rows.queries, layer.cache)
        )
        return self._attention.attend(self._looks[layer.kind], rows.queries, *layer.cache.chunk(2))

    def _after_attention(self, layer: CpuLayer, attended: torch.Tensor) -> torch.Tensor:
        """Take outputs of attention [n, heads * dim]; return the norm after the layer."""
        hidden, merged = self._rows.hidden, self._merged
        _, out, gate_up, down = layer.products
        _, before_mlp, after = layer.norms
        normed = merged.add_and_norm(hidden, out(attended), before_mlp)
        change = down(merged.gate(gate_up(normed)))
        return merged.add_and_norm(hidden, change, after)


class _Layer(ctypes.Structure):
    """The structure `Layer` of cpu_operators.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _POINTER) for name in ("head_norm", "before_mlp", "after", "cache")),
        ("kind", _SIZE),
    )

    @classmethod
    def of(cls, layer: CpuLayer) -> "_Layer | None":
        """Return a layer as the library reads it; None: a product is not ours. Keep the layer."""
        ours = [product for product in layer.products if isinstance(product, TiledProduct)]
        if len(ours) < len(layer.products):
            return None
        norms = [0 if norm is None else norm.data_ptr() for norm in layer.norms]
        addresses = *(product.address for product in ours), *norms, layer.cache.data_ptr()
        return cls(*addresses, layer.kind)


class _Pass(ctypes.Structure):
    """The structure `Pass` of cpu_operators.cpp."""

    _fields_ = (
        ("heads", Sizes),
        *((name, _SIZE) for name in ("size", "inner")),
        *((name, _POINTER) for name in ("hidden", "normed", "change", "qkv", "queries")),
        *((name, _POINTER) for name in ("both", "gated", "cos", "sin", "slots")),
        *((name, _POINTER) for name in ("looks", "attended")),
    )


def _function(dtype: torch.dtype) -> Callable[..., None]:
    """Return the function of cpu_operators.cpp that runs layers, for numbers of one type."""
    found = library(compiles=False)
    assert found is not None, "there are merged operators, so there is a library"
    function = found[f"slipstream_layers_{NAMES[dtype]}"]
    function.argtypes, function.restype = (_POINTER, _SIZE, _SIZE, _POINTER), None
    return function


class _Structure:
    """A pass as the library reads it, and the memory that it uses."""

    def __init__(
        self,
        first: CpuLayer,
        rows: Rows,
        looks: Sequence[Any],
        normed: torch.Tensor,
        epsilon: float,
    ) -> None:
        """Allocate the memory. first: any layer, for the sizes; normed: changed in place."""
        _, out, _, down = first.products
        assert isinstance(out, TiledProduct)
        assert isinstance(down, TiledProduct)
        hidden, qkv_width, inner = rows.hidden, rows.queries.shape[1], down.num_inputs
        # One piece of memory for what lies between the steps.
        starts = [0]
        for width in (hidden.shape[1], qkv_width, 2 * inner, inner, out.num_inputs):
            num_bytes = len(hidden) * width * hidden.element_size()
            starts.append(starts[-1] + -(-num_bytes // _LINE) * _LINE)
        room, slots = torch.empty(starts[-1], dtype=torch.uint8), rows.slots.contiguous()
        change, qkv, both, gated, attended = (room.data_ptr() + start for start in starts[:-1])
        addresses = (_POINTER * len(looks))(*map(ctypes.addressof, looks))
        self.normed = normed
        self._kept = room, slots, rows, looks, addresses  # what the structure points to
        self._pass = _Pass(
            Sizes.of(rows.queries, first.cache, epsilon),
            *(hidden.shape[1], inner, hidden.data_ptr(), normed.data_ptr(), change),
            *(qkv, rows.queries.data_ptr(), both, gated),
            *(tensor.data_ptr() for tensor in (rows.cos, rows.sin, slots)),
            *(ctypes.addressof(addresses), attended),
        )
        self.address = ctypes.addressof(self._pass)


class _Together:
    """The steps of a pass whose products are all our own, in one call."""

    def __init__(
        self, run: Callable[..., None], layers: "ctypes.Array[_Layer]", structure: _Structure
    ) -> None:
        self._run, self._layers, self._structure = run, layers, structure

    def run(self, first: int, last: int) -> torch.Tensor:
        """As for `_OneByOne`."""
        self._run(ctypes.addressof(self._layers), first, last, self._structure.address)
        return self._structure.normed
