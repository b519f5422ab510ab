"""A model's layers on a CPU, except attention: two calls of our own each, or operator by operator.

While a pass reads its weights from memory, they push everything else out of the caches, also what
Python needs for a call: a small operator that takes 7 us in a loop takes 20 in a pass. So where all
products are our own, the steps from one attention to the next are two calls for each layer.

Knows the order of a layer's steps (also in cpu_operators.cpp) and the calls of the two functions
there; neither attention nor the model's classes.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from engine.cpu_library import library
from engine.forward.cpu_operators import NAMES, CpuOperators, Heads
from engine.forward.operators import Product
from engine.quantised.cpu_products import TiledProduct

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_LINE = 64  # bytes: where memory of a pass begins


@dataclass(frozen=True, slots=True)
class CpuLayer:
    """One decoder layer: its products, the weights of its norms, its cache.

    head_norm   [heads + 2 kv_heads, dim]: of queries and keys, ones for values; None: it has none
    before_mlp  [hidden]: of the norm before the feed-forward block
    after       [hidden]: of the norm after the layer: the next layer's first, or the model's last
    cache       [2 kv_heads, slots, dim]: keys, then values
    """

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    head_norm: torch.Tensor | None
    before_mlp: torch.Tensor
    after: torch.Tensor
    cache: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a pass.

    hidden    [n, hidden]: embeddings; changed in place
    cos, sin  [n, 1, dim]: of each row's position; sin is negative in its first half
    slots     [n] int64: the slots that keys and values are written to
    queries   [n, (heads + 2 kv_heads) * dim]: memory, of which the queries are written
    """

    hidden: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    queries: torch.Tensor


class CpuPass(Protocol):
    """The steps of one pass. `normed` [n, hidden] is the norm of what the last layer left."""

    normed: torch.Tensor

    def before_attention(self, number: int) -> None:
        """Write a layer's queries, keys and values; number: of the layer, from 0."""

    def after_attention(self, number: int, attended: torch.Tensor) -> None:
        """Take a layer's outputs of attention [n, heads * dim]; update `hidden` and `normed`."""


class CpuLayers:
    """All layers of a model, for numbers of one type."""

    def __init__(
        self, merged: CpuOperators, first_norm: torch.Tensor, layers: Sequence[CpuLayer]
    ) -> None:
        """Take the merged operators, the weight [hidden] of the first norm, and the layers."""
        self._merged = merged
        self._first_norm = first_norm
        self._layers = layers
        ours = [_Layer.of(layer) for layer in layers]
        self._ours = [one for one in ours if one is not None]
        self._functions: _Functions | None = None
        if len(self._ours) == len(layers):
            self._functions = _Functions(layers[0].cache.dtype)

    def start(self, rows: Rows) -> CpuPass:
        """Return the steps of a pass."""
        merged, layers = self._merged, self._layers
        normed = merged.add_and_norm(rows.hidden, None, self._first_norm)
        if self._functions is None:
            return _OneByOne(merged, layers, rows, normed)
        return _Together(self._functions, self._ours, layers[0], rows, normed, merged.epsilon)


class _OneByOne:
    """A pass with any products."""

    def __init__(
        self,
        merged: CpuOperators,
        layers: Sequence[CpuLayer],
        rows: Rows,
        normed: torch.Tensor,
    ) -> None:
        self.normed = normed
        self._merged, self._layers, self._rows = merged, layers, rows

    def before_attention(self, number: int) -> None:
        layer, rows = self._layers[number], self._rows
        self._merged.turn_and_write(
            *(layer.qkv(self.normed), layer.head_norm, rows.cos, rows.sin),
            *(rows.slots, rows.queries, layer.cache),
        )

    def after_attention(self, number: int, attended: torch.Tensor) -> None:
        layer, hidden, merged = self._layers[number], self._rows.hidden, self._merged
        normed = merged.add_and_norm(hidden, layer.out(attended), layer.before_mlp)
        change = layer.down(merged.gate(layer.gate_up(normed)))
        self.normed = merged.add_and_norm(hidden, change, layer.after)


class _Layer(ctypes.Structure):
    """The structure `Layer` of cpu_operators.cpp."""

    _fields_ = tuple((field.name, _POINTER) for field in fields(CpuLayer))

    @classmethod
    def of(cls, layer: CpuLayer) -> "_Layer | None":
        """Return a layer as the library reads it; None: a product is not ours. Keep the layer."""
        products = [layer.qkv, layer.out, layer.gate_up, layer.down]
        ours = [product.address for product in products if isinstance(product, TiledProduct)]
        if len(ours) < len(products):
            return None
        head_norm = 0 if layer.head_norm is None else layer.head_norm.data_ptr()
        rest = layer.before_mlp, layer.after, layer.cache
        return cls(*ours, head_norm, *(tensor.data_ptr() for tensor in rest))


class _Pass(ctypes.Structure):
    """The structure `Pass` of cpu_operators.cpp."""

    _fields_ = (
        ("heads", Heads),
        *((name, _SIZE) for name in ("size", "inner")),
        *((name, _POINTER) for name in ("hidden", "normed", "change", "qkv", "queries")),
        *((name, _POINTER) for name in ("both", "gated", "cos", "sin", "slots")),
    )


class _Functions:
    """The two functions of cpu_operators.cpp, for numbers of one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        found = library(compiles=False)
        assert found is not None, "there are merged operators, so there is a library"
        self.before_attention = found[f"slipstream_before_attention_{NAMES[dtype]}"]
        self.before_attention.argtypes = (_POINTER,) * 2
        self.after_attention = found[f"slipstream_after_attention_{NAMES[dtype]}"]
        self.after_attention.argtypes = (_POINTER,) * 3
        for function in (self.before_attention, self.after_attention):
            function.restype = None


class _Together:
    """A pass whose products are all our own."""

    def __init__(
        self,
        functions: _Functions,
        layers: Sequence[_Layer],
        first: CpuLayer,
        rows: Rows,
        normed: torch.Tensor,
        epsilon: float,
    ) -> None:
        self.normed = normed
        self._functions, self._layers = functions, layers
        assert isinstance(first.qkv, TiledProduct)
        assert isinstance(first.down, TiledProduct)
        hidden, inner = rows.hidden, first.down.num_inputs
        # One piece of memory for what lies between the steps.
        starts = [0]
        for width in (hidden.shape[1], first.qkv.num_outputs, 2 * inner, inner):
            num_bytes = len(hidden) * width * hidden.element_size()
            starts.append(starts[-1] + -(-num_bytes // _LINE) * _LINE)
        room, slots = torch.empty(starts[-1], dtype=torch.uint8), rows.slots.contiguous()
        self._kept = room, slots, rows  # what the structure points to
        change, qkv, both, gated = (room.data_ptr() + start for start in starts[:-1])
        self._pass = _Pass(
            Heads.of(rows.queries, first.cache, epsilon),
            *(hidden.shape[1], inner, hidden.data_ptr(), normed.data_ptr(), change),
            *(qkv, rows.queries.data_ptr(), both, gated),
            *(tensor.data_ptr() for tensor in (rows.cos, rows.sin, slots)),
        )
        self._address = ctypes.addressof(self._pass)

    def before_attention(self, number: int) -> None:
        self._functions.before_attention(ctypes.addressof(self._layers[number]), self._address)

    def after_attention(self, number: int, attended: torch.Tensor) -> None:
        attended = attended.contiguous()
        layer = ctypes.addressof(self._layers[number])
        self._functions.after_attention(layer, self._address, attended.data_ptr())
