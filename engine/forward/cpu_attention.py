"""Attention of our own on a CPU: what the rows of a pass see, and the calls of cpu_attention.cpp.

A row's numbers depend on what it sees in the order of positions, not on slots, other rows or
threads: so a draft's row in a tree has the same bits as the row of its token alone. Therefore the
position of the token in each slot is kept here.

Knows no layer and no model.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.cpu_library import library
from engine.layout.attention_windows import LayerKinds
from engine.layout.slots import Span

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_MULTIPLE = 16  # a head has a multiple of so many numbers

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_NUM_FIRST = 5  # of a pass's integers; two for each window follow


class _Lane(ctypes.Structure):
    """The structure `Lane` of cpu_attention.cpp."""

    _fields_ = tuple((name, _SIZE) for name in ("first_row", "num_rows", "first_slot"))


class _Told(ctypes.Structure):
    """The structure `Told` of cpu_attention.cpp."""

    _fields_ = (
        ("lines", _POINTER),
        *((name, _SIZE) for name in ("num_rows", "num_lanes")),
        ("lanes", _POINTER),
        ("num_kinds", _SIZE),
        *((name, _POINTER) for name in ("windows", "placed")),
    )


class _Look(ctypes.Structure):
    """The structure `Look` of cpu_attention.cpp."""

    _fields_ = (
        *((name, _SIZE) for name in ("num_heads", "num_kv_heads", "dim", "num_slots")),
        ("row_stride", _SIZE),
        ("scale", _FLOAT),
        ("num_lanes", _SIZE),
        *((name, _POINTER) for name in ("lanes", "seen")),
    )


@dataclass(frozen=True, slots=True)
class Sight:
    """What the rows of a pass see, as the library reads it.

    lanes  of the pass
    seen   per kind of layer, what each row sees
    size   bytes of one kind
    """

    lanes: "ctypes.Array[_Lane]"
    seen: torch.Tensor
    size: int

    def look(self, kind: int, heads: "Heads", row_stride: int, scale: float) -> _Look:
        """Return how attention in layers of a kind is computed."""
        of_lanes = len(self.lanes), ctypes.addressof(self.lanes)
        seen = self.seen.data_ptr() + kind * self.size
        return _Look(*heads, row_stride, scale, *of_lanes, seen)


class Heads(NamedTuple):
    """The heads of a layer's attention, and the slots of its cache."""

    num_heads: int
    num_kv_heads: int
    dim: int
    num_slots: int


class CpuAttention:
    """Attention of a model over its layers' caches."""

    def __init__(
        self, found: ctypes.CDLL, dtype: torch.dtype, num_slots: int, kinds: LayerKinds
    ) -> None:
        """Take the library, the numbers' type, the slots of all lanes and what the layers see."""
        self._attend = found[f"slipstream_attend_{NAMES[dtype]}"]
        self._attend.argtypes, self._attend.restype = (_POINTER,) * 5, None
        self._see = found.slipstream_see
        self._see.argtypes, self._see.restype = (_POINTER,) * 2, None
        row_bytes = found.slipstream_row_bytes
        row_bytes.argtypes, row_bytes.restype = (), _SIZE
        self._row_bytes = int(row_bytes())
        lines = [0 if one is None else _NUM_FIRST + 2 * one for one in kinds.numbers]
        self._windows = (_SIZE * len(lines))(*lines)
        self._placed = torch.zeros(num_slots, dtype=torch.int32)

    def see(self, rows: torch.Tensor, spans: Sequence[Span]) -> Sight:
        """Note where the tokens of a pass lie; return what its rows see.

        rows, spans  as in `Backend.forward`; all rows must be seen before any layer is computed
        """
        rows = rows.contiguous()
        num_rows, num_kinds, first = rows.shape[1], len(self._windows), 0
        made = []
        for span in spans:
            made.append(_Lane(first, span.num_rows, span.first_slot))
            first += span.num_rows
        assert first == num_rows
        lanes, size = (_Lane * len(made))(*made), num_rows * self._row_bytes
        seen = torch.empty(num_kinds * size, dtype=torch.uint8)
        told = _Told(
            *(rows.data_ptr(), num_rows, len(lanes), ctypes.addressof(lanes), num_kinds),
            *(ctypes.addressof(self._windows), self._placed.data_ptr()),
        )
        self._see(ctypes.addressof(told), seen.data_ptr())
        return Sight(lanes, seen, size)

    def attend(
        self, look: _Look, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs of attention [n, heads * dim] in a layer.

        queries  [n, row stride], of which the first heads * dim are read
        keys, values  [kv_heads, slots, dim]: from the first slot of the cache on
        """
        out = queries.new_empty(len(queries), look.num_heads * look.dim)
        tensors = queries, keys, values, out
        self._attend(ctypes.addressof(look), *(tensor.data_ptr() for tensor in tensors))
        return out

    def note(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Note tokens whose keys and values were written without `see`; int64 [n] each."""
        self._placed[slots] = positions.to(torch.int32)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Note that slots were copied, all read before any was written; int64 [n] each."""
        self._placed[targets] = self._placed[sources]

    def copy(self, source: int, target: int, length: int) -> None:
        """Note that `length` slots from `source` on were copied to `target` on."""
        self._placed[target : target + length] = self._placed[source : source + length]


def fits(dtype: torch.dtype, dim: int) -> bool:
    """True if there is attention of our own for heads of this type and so many numbers."""
    return dtype in NAMES and dim % _MULTIPLE == 0


def cpu_attention(dtype: torch.dtype, num_slots: int, kinds: LayerKinds) -> CpuAttention | None:
    """Return our attention for numbers of a type; None: not for this one, or not compiled.

    num_slots  of all lanes of the cache
    """
    found = library(compiles=False) if dtype in NAMES else None
    return None if found is None else CpuAttention(found, dtype, num_slots, kinds)
