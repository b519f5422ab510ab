"""Attention of our own on a CPU: what the rows of a pass see, and the calls of cpu_attention.cpp.

A row's numbers depend on what it sees in the order of positions, not on slots, other rows or
threads: so a draft's row in a tree has the same bits as the row of its token alone. Therefore the
position of the token in each slot is kept here.

Knows no layer and no model.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.cpu_library import library
from engine.forward.forward import Spans
from engine.layout.attention_windows import LayerKinds

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


@dataclass(frozen=True)
class Sight:
    """What the rows of a pass see, as the library reads it.

    looks  per kind of layer, how its attention is computed
    memory  what these point to
    """

    looks: "ctypes.Array[_Look]"
    memory: tuple[object, ...]

    @cached_property
    def addresses(self) -> "ctypes.Array[ctypes.c_void_p]":
        """The addresses of `looks`."""
        first, size = ctypes.addressof(self.looks), ctypes.sizeof(_Look)
        return (_POINTER * len(self.looks))(*(first + i * size for i in range(len(self.looks))))


class CpuAttention:
    """Attention over layers' caches [2 kv_heads, slots, dim] (keys, then values)."""

    def __init__(
        self,
        found: ctypes.CDLL,
        cache: torch.Tensor,
        *,
        num_heads: int,
        scale: float,
        kinds: LayerKinds,
    ) -> None:
        """Take the library and the cache of any layer.

        num_heads  number of query heads
        scale      factor of the scores
        kinds      what the layers see of a text
        """
        self._attend = found[f"slipstream_attend_{NAMES[cache.dtype]}"]
        self._attend.argtypes, self._attend.restype = (_POINTER,) * 4, None
        self._see = found.slipstream_see
        self._see.argtypes, self._see.restype = (_POINTER,) * 2, None
        row_bytes = found.slipstream_row_bytes
        row_bytes.argtypes, row_bytes.restype = (), _SIZE
        self._row_bytes = int(row_bytes())
        num_kv_heads, self._num_slots, dim = len(cache) // 2, *cache.shape[1:]
        self._heads = num_heads, num_kv_heads, dim, self._num_slots
        self._row_stride = (num_heads + 2 * num_kv_heads) * dim
        self._width = num_heads * dim
        self._scale = scale
        lines = [0 if one is None else _NUM_FIRST + 2 * one for one in kinds.numbers]
        self._windows = (_SIZE * len(lines))(*lines)
        self._placed = torch.zeros(self._num_slots, dtype=torch.int32)

    def see(self, rows: torch.Tensor, spans: Spans) -> Sight:
        """Note where the tokens of a pass lie; return what its rows see.

        rows, spans  as in `Backend.forward`; all rows must be seen before any layer is computed
        """
        rows = rows.contiguous()
        num_rows, num_kinds = rows.shape[1], len(self._windows)
        starts = [0]
        for span in spans:
            starts.append(starts[-1] + span.num_rows)
        assert starts[-1] == num_rows
        made = [_Lane(*one) for one in zip(starts, *zip(*_sizes(spans), strict=True), strict=False)]
        lanes = (_Lane * len(made))(*made)
        seen = torch.empty(num_kinds * num_rows * self._row_bytes, dtype=torch.uint8)
        told = _Told(
            *(rows.data_ptr(), num_rows, len(lanes), ctypes.addressof(lanes), num_kinds),
            *(ctypes.addressof(self._windows), self._placed.data_ptr()),
        )
        self._see(ctypes.addressof(told), seen.data_ptr())
        fixed = *self._heads, self._row_stride, self._scale, len(lanes), ctypes.addressof(lanes)
        size = num_rows * self._row_bytes
        looks = [_Look(*fixed, seen.data_ptr() + kind * size) for kind in range(num_kinds)]
        return Sight((_Look * num_kinds)(*looks), (lanes, seen))

    def attend(
        self, sight: Sight, kind: int, queries: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs of attention [n, heads * dim] in a layer of a kind.

        queries  [n, (heads + 2 kv_heads) * dim], of which the first heads are read
        cache    [2 kv_heads, slots, dim]
        """
        out = queries.new_empty(len(queries), self._width)
        look = ctypes.addressof(sight.looks) + kind * ctypes.sizeof(_Look)
        self._attend(look, queries.data_ptr(), cache.data_ptr(), out.data_ptr())
        return out

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Note that slots were copied, all read before any was written; int64 [n] each."""
        self._placed[targets] = self._placed[sources]

    def copy(self, source: int, target: int, length: int) -> None:
        """Note that `length` slots from `source` on were copied to `target` on."""
        self._placed[target : target + length] = self._placed[source : source + length]


def _sizes(spans: Spans) -> Sequence[tuple[int, int]]:
    return [(span.num_rows, span.first_slot) for span in spans]


def cpu_attention(
    cache: torch.Tensor, *, num_heads: int, scale: float, kinds: LayerKinds
) -> CpuAttention | None:
    """Return our attention over a layer's cache; None: not for such heads, or not compiled."""
    fits = cache.dtype in NAMES and cache.shape[2] % _MULTIPLE == 0
    found = library(compiles=False) if fits and cache.device.type == "cpu" else None
    if found is None:
        return None
    return CpuAttention(found, cache, num_heads=num_heads, scale=scale, kinds=kinds)
