"""A model's layers on a CPU: in one call of our own, in two for each layer, or step by step.

While a pass reads its weights from memory, they push everything else out of the caches, also what
Python needs for a call: a small operator that takes 7 us in a loop takes 20 in a pass. So where all
products are our own, the steps from one attention to the next are two calls for each layer, and
where attention is our own too, all layers are one call.

Knows the order of a layer's steps (also in cpu_operators.cpp) and the calls of the functions there;
not the model's classes.
"""

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import torch

from engine.cpu_library import library
from engine.forward.cpu_operators import BLOCK, NAMES, CpuOperators, Heads
from engine.forward.forward import LAST, Layers, Spans
from engine.forward.operators import (
    COMPARED_ROWS,
    Product,
    in_words,
    is_never_slower,
    seconds_of_passes,
)
from engine.quantised.cpu_products import TiledProduct

logger = logging.getLogger(__name__)

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_LINE = 64  # bytes: where memory of a pass begins
_CHECKED_ROWS = 4  # of the pass by whose logits operators are checked
_ANY_ROWS = 1 << 30
_MANY_ROWS = 16  # the most rows of a pass that are tried in one call
_MERGED, _ONE_CALL, _APART = "merged", "in one call", "one by one"

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
    kind      index of what it sees (`Sight.masks`)
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
    """

    hidden: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    queries: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sight:
    """What the rows of a pass see.

    spans        the lanes, in the order of their rows
    masks        per kind of layer, [1, 1, n, slots seen], added to the scores: the last of the
                 visible slots
    num_visible  slots of each lane that some layer sees
    """

    spans: Spans
    masks: Sequence[torch.Tensor]
    num_visible: int


class CpuLayers:
    """All layers of a model, for numbers of one type."""

    def __init__(
        self,
        merged: CpuOperators,
        first_norm: torch.Tensor,
        layers: Sequence[CpuLayer],
        scale: float,
    ) -> None:
        """Take the merged operators, the weight [hidden] of the first norm, and the layers.

        scale  factor of attention's scores
        """
        self._merged = merged
        self._first_norm = first_norm
        self._layers = layers
        self._scale = scale
        ours = [found for layer in layers if (found := _Layer.of(layer)) is not None]
        self._ours = (_Layer * len(ours))(*ours)
        is_ours = len(ours) == len(layers)
        self._functions = _Functions(layers[0].cache.dtype) if is_ours else None
        self.most_rows = 0  # passes of more rows of a lane are not one call

    @property
    def can_be_one_call(self) -> bool:
        """True if passes can be one call, whether that is faster or not."""
        return self._functions is not None and self._layers[0].cache.shape[2] % BLOCK == 0

    def is_one_call(self, spans: Spans) -> bool:
        """True if a pass over these lanes is to be one call."""
        return all(span.num_rows <= self.most_rows for span in spans)

    def run(self, rows: Rows, wanted: Layers, attended: Iterable[torch.Tensor]) -> Result:
        """Run a pass.

        wanted    the layers whose inputs are kept
        attended  makes each layer's outputs of attention [n, heads * dim] when it is asked for
                  them, from the queries, keys and values that were written
        """
        normed = self._begin(rows)
        steps: _OneByOne | _Together
        if self._functions is None:
            steps = _OneByOne(self._merged, self._layers, rows, normed)
        else:
            steps = _Together(self._functions, self._ours, self._structure(rows, normed))
        states: dict[int, torch.Tensor] = {}
        outputs = iter(attended)
        for number in range(len(self._layers)):
            if number in wanted:
                states[number] = rows.hidden.clone()  # `hidden` changes in place below
            steps.before_attention(number)
            normed = steps.after_attention(number, next(outputs))
        return _result(normed, states, wanted)

    def run_whole(self, rows: Rows, wanted: Layers, sight: Sight) -> Result:
        """Run a pass with attention of our own, in one call; only if `is_one_call`."""
        assert self._functions is not None
        normed = self._begin(rows)
        structure = self._structure(rows, normed, sight)
        states: dict[int, torch.Tensor] = {}
        first = 0
        for number in (*sorted(set(wanted) & set(range(len(self._layers)))), len(self._layers)):
            arguments = ctypes.addressof(self._ours), first, number, structure.address
            self._functions.layers(*arguments)
            if number in wanted:
                states[number] = rows.hidden.clone()
            first = number
        return _result(structure.normed, states, wanted)

    def _begin(self, rows: Rows) -> torch.Tensor:
        return self._merged.add_and_norm(rows.hidden, None, self._first_norm)

    def _structure(
        self, rows: Rows, normed: torch.Tensor, sight: Sight | None = None
    ) -> "_Structure":
        return _Structure(self._layers[0], rows, normed, self._merged.epsilon, self._scale, sight)


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
    for name, form in _forms(layers, run).items():
        error = (form(num_rows) - want).abs().max() / want.abs().max()
        if not error <= tolerance:  # nor if it is NaN
            logger.warning("operators (%s) give other logits (%.2g off): not used", name, error)
            return None
    return layers


def chosen(
    layers: CpuLayers,
    run: Callable[[CpuLayers | None, int], torch.Tensor],
    most_rows: int,
    *,
    are_wanted: bool,
) -> CpuLayers | None:
    """Return the layers, after timing up to which number of rows a pass is one call.

    Returns None if whole passes by single operators are faster for any number of rows; unless the
    layers `are_wanted`, because a comparison before has found them to be as fast. The number of
    rows changes no bit: one call computes the same as two for each layer.

    run, most_rows  as for `checked`
    """
    row_counts = [count for count in (*COMPARED_ROWS, _MANY_ROWS) if count <= most_rows]
    forms = _forms(layers, run)
    apart = {} if are_wanted else {_APART: partial(run, None)}
    seconds = seconds_of_passes({**forms, **apart}, row_counts)
    merged = seconds[_MERGED]
    one_call = seconds.get(_ONE_CALL, merged)
    faster = takewhile(lambda count: one_call[count] <= merged[count], row_counts)
    layers.most_rows = max(faster, default=0) if layers.can_be_one_call else 0
    ours = {n: (one_call if n <= layers.most_rows else merged)[n] for n in row_counts}
    is_taken = are_wanted or is_never_slower(ours, seconds[_APART])
    words = f"in one call up to {layers.most_rows} rows, else merged" if is_taken else _APART
    logger.info("operators run %s; ms of a pass: %s", words, in_words(seconds))
    return layers if is_taken else None


def _forms(
    layers: CpuLayers, run: Callable[[CpuLayers | None, int], torch.Tensor]
) -> dict[str, Callable[[int], torch.Tensor]]:
    """Return the forms of a pass with these layers: functions of its number of rows."""

    def in_calls(rows_of_a_call: int, num_rows: int) -> torch.Tensor:
        layers.most_rows = rows_of_a_call
        return run(layers, num_rows)

    forms: dict[str, Callable[[int], torch.Tensor]] = {_MERGED: partial(in_calls, 0)}
    if layers.can_be_one_call:
        forms[_ONE_CALL] = partial(in_calls, _ANY_ROWS)
    return forms


def _result(normed: torch.Tensor, states: dict[int, torch.Tensor], wanted: Layers) -> Result:
    if LAST in wanted:
        states[LAST] = normed
    return normed, states


class _OneByOne:
    """The steps of a pass with any products."""

    def __init__(
        self,
        merged: CpuOperators,
        layers: Sequence[CpuLayer],
        rows: Rows,
        normed: torch.Tensor,
    ) -> None:
        self._merged, self._layers, self._rows, self._normed = merged, layers, rows, normed

    def before_attention(self, number: int) -> None:
        """Write a layer's queries, keys and values."""
        layer, rows = self._layers[number], self._rows
        qkv, head_norm = layer.products[0](self._normed), layer.norms[0]
        self._merged.turn_and_write(
            *(qkv, head_norm, rows.cos, rows.sin, rows.slots, rows.queries, layer.cache)
        )

    def after_attention(self, number: int, attended: torch.Tensor) -> torch.Tensor:
        """Take a layer's outputs of attention [n, heads * dim]; return the norm after the layer."""
        layer, hidden, merged = self._layers[number], self._rows.hidden, self._merged
        _, out, gate_up, down = layer.products
        _, before_mlp, after = layer.norms
        normed = merged.add_and_norm(hidden, out(attended), before_mlp)
        change = down(merged.gate(gate_up(normed)))
        self._normed = merged.add_and_norm(hidden, change, after)
        return self._normed


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


class _Lane(ctypes.Structure):
    """The structure `Lane` of cpu_operators.cpp."""

    _fields_ = tuple((name, _SIZE) for name in ("first_row", "num_rows", "first_slot"))


class _Seen(ctypes.Structure):
    """The structure `Seen` of cpu_operators.cpp."""

    _fields_ = (
        ("mask", _POINTER),
        *((name, _SIZE) for name in ("mask_stride", "num_keys", "num_skipped")),
    )


class _Pass(ctypes.Structure):
    """The structure `Pass` of cpu_operators.cpp."""

    _fields_ = (
        ("heads", Heads),
        *((name, _SIZE) for name in ("size", "inner")),
        *((name, _POINTER) for name in ("hidden", "normed", "change", "qkv", "queries")),
        *((name, _POINTER) for name in ("both", "gated", "cos", "sin", "slots")),
        ("num_lanes", _SIZE),
        *((name, _POINTER) for name in ("lanes", "seen", "attended")),
        ("scale", _FLOAT),
    )


class _Functions:
    """The functions of cpu_operators.cpp for layers, for numbers of one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        found = library(compiles=False)
        assert found is not None, "there are merged operators, so there is a library"
        self.before_attention = found[f"slipstream_before_attention_{NAMES[dtype]}"]
        self.before_attention.argtypes = (_POINTER,) * 2
        self.after_attention = found[f"slipstream_after_attention_{NAMES[dtype]}"]
        self.after_attention.argtypes = (_POINTER,) * 3
        self.layers = found[f"slipstream_layers_{NAMES[dtype]}"]
        self.layers.argtypes = (_POINTER, _SIZE, _SIZE, _POINTER)
        for function in (self.before_attention, self.after_attention, self.layers):
            function.restype = None


class _Structure:
    """A pass as the library reads it, and the memory that it uses."""

    def __init__(
        self,
        first: CpuLayer,
        rows: Rows,
        normed: torch.Tensor,
        epsilon: float,
        scale: float,
        sight: Sight | None,
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
        lanes, seen = ((), ()) if sight is None else _of_sight(sight)
        self.normed = normed
        self._kept = room, slots, rows, sight, lanes, seen  # what the structure points to
        self._pass = _Pass(
            Heads.of(rows.queries, first.cache, epsilon),
            *(hidden.shape[1], inner, hidden.data_ptr(), normed.data_ptr(), change),
            *(qkv, rows.queries.data_ptr(), both, gated),
            *(tensor.data_ptr() for tensor in (rows.cos, rows.sin, slots)),
            len(lanes),
            *(ctypes.addressof(array) if array else 0 for array in (lanes, seen)),
            *(attended, scale),
        )
        self.address = ctypes.addressof(self._pass)


def _of_sight(sight: Sight) -> tuple["ctypes.Array[_Lane]", "ctypes.Array[_Seen]"]:
    """Return the lanes and what the layers of each kind see of them."""
    lanes, first_row = [], 0
    for span in sight.spans:
        lanes.append(_Lane(first_row, span.num_rows, span.first_slot))
        first_row += span.num_rows
    seen = [
        _Seen(mask.data_ptr(), mask.stride(2), mask.shape[3], sight.num_visible - mask.shape[3])
        for mask in sight.masks
    ]
    return (_Lane * len(lanes))(*lanes), (_Seen * len(seen))(*seen)


class _Together:
    """The steps of a pass whose products are all our own."""

    def __init__(
        self, functions: _Functions, layers: "ctypes.Array[_Layer]", structure: _Structure
    ) -> None:
        self._functions, self._structure = functions, structure
        self._first, self._size = ctypes.addressof(layers), ctypes.sizeof(_Layer)

    def before_attention(self, number: int) -> None:
        """As for `_OneByOne`."""
        layer = self._first + number * self._size
        self._functions.before_attention(layer, self._structure.address)

    def after_attention(self, number: int, attended: torch.Tensor) -> torch.Tensor:
        """As for `_OneByOne`."""
        attended, layer = attended.contiguous(), self._first + number * self._size
        self._functions.after_attention(layer, self._structure.address, attended.data_ptr())
        return self._structure.normed
