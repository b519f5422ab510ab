"""The operators between matrix products and attention, on a CPU, merged into three of our own.

A pass of few rows has some twenty small operators in each layer, and calling one of torch's takes
longer than computing it. Here a layer has one for each norm with the sum before it, one for the
gate, and one that norms, turns and writes queries, keys and values.

Computes in float32 and rounds where transformers does. Owns the calls of cpu_operators.cpp; knows
no layer.
"""

import ctypes

import torch

from engine.cpu_library import library
from engine.forward.cpu_attention import NAMES

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Sizes(ctypes.Structure):
    """The structure `Heads` of cpu_operators.cpp."""

    _fields_ = (
        *((name, _SIZE) for name in ("num_rows", "num_heads", "num_kv_heads", "dim", "num_slots")),
        ("epsilon", _FLOAT),
    )

    @classmethod
    def of(cls, qkv: torch.Tensor, cache: torch.Tensor, epsilon: float) -> "Sizes":
        """Return the sizes of a pass (rows, heads, key heads, slots) for the C++ code.

        `qkv` and `cache` are as for `CpuOperators.turn_and_write`.
        """
        num_kv_heads, dim = cache.shape[0] // 2, cache.shape[2]
        num_heads = qkv.shape[1] // dim - 2 * num_kv_heads
        return cls(len(qkv), num_heads, num_kv_heads, dim, cache.shape[1], epsilon)


class CpuOperators:
    """The merged operators for numbers of one type.

    Tensors are contiguous, of that type and on the CPU.
    """

    def __init__(self, found: ctypes.CDLL, dtype: torch.dtype, epsilon: float) -> None:
        """Take the library; `epsilon` is that of all norms."""
        self.epsilon = epsilon
        self._add_and_norm = found[f"slipstream_add_and_norm_{NAMES[dtype]}"]
        self._add_and_norm.argtypes = (*(_POINTER,) * 4, _SIZE, _SIZE, _FLOAT)
        self._gate = found[f"slipstream_gate_{NAMES[dtype]}"]
        self._gate.argtypes = (_POINTER, _POINTER, _SIZE, _SIZE)
        self._turn_and_write = found[f"slipstream_turn_and_write_{NAMES[dtype]}"]
        self._turn_and_write.argtypes = (_POINTER,) * 8
        self._enter_head = found[f"slipstream_enter_head_{NAMES[dtype]}"]
        self._enter_head.argtypes = (*(_POINTER,) * 6, _SIZE, _SIZE, _FLOAT, _SIZE)
        for function in (self._add_and_norm, self._gate, self._turn_and_write, self._enter_head):
            function.restype = None

    def add_and_norm(
        self, hidden: torch.Tensor, change: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add `change` to `hidden` in place; return the sum's RMS norm, all [n, dim]."""
        normed = torch.empty_like(hidden)
        address = 0 if change is None else change.data_ptr()
        sizes = *hidden.shape, self.epsilon
        self._add_and_norm(hidden.data_ptr(), address, weight.data_ptr(), normed.data_ptr(), *sizes)
        return normed

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gates) * ups [n, inner] of gates and ups [n, 2 inner]."""
        num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        made = gate_up.new_empty(num_rows, inner)
        self._gate(gate_up.data_ptr(), made.data_ptr(), num_rows, inner)
        return made

    def turn_and_write(
        self,
        qkv: torch.Tensor,
        weights: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        queries: torch.Tensor,
        cache: torch.Tensor,
    ) -> None:
        """Norm and turn queries and keys; write queries to memory, keys and values to the cache.

        qkv, queries  [n, (heads + 2 kv_heads) * dim]; of `queries` the first heads are written
        weights       [heads + kv_heads or more, dim] of norms; None: there are none
        cos, sin      [n, 1, dim]: of each row's position; sin is negative in its first half
        slots         [n] int64
        cache         [2 kv_heads, slots, dim]
        """
        heads = Sizes.of(qkv, cache, self.epsilon)
        tensors = (cos, sin, slots.contiguous(), queries, cache)
        address = 0 if weights is None else weights.data_ptr()
        rest = [tensor.data_ptr() for tensor in tensors]
        self._turn_and_write(ctypes.addressof(heads), qkv.data_ptr(), address, *rest)

    def enter_head(
        self,
        embeddings: torch.Tensor,
        ids: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        hidden: torch.Tensor,
        *,
        residual_is_normed: bool,
    ) -> torch.Tensor:
        """Return what goes into the layer of an EAGLE-3 head: two norms side by side [n, 2 dim].

        embeddings  [tokens, dim], and `ids` [n] int64 into them
        norms       the weights [dim] of the norms of embeddings and of states
        hidden      [n, dim]: the states; if the residual is their norm, that replaces them
        """
        (num_rows, dim), ids = hidden.shape, ids.contiguous()
        entering = hidden.new_empty(num_rows, 2 * dim)
        tensors = embeddings, ids, *norms, hidden, entering
        addresses = [tensor.data_ptr() for tensor in tensors]
        self._enter_head(*addresses, num_rows, dim, self.epsilon, residual_is_normed)
        return entering


def operators(dtype: torch.dtype, epsilon: float) -> CpuOperators | None:
    """Return the merged operators; None: not for this type, or not compiled by an earlier start."""
    found = library(compiles=False) if dtype in NAMES else None
    return None if found is None else CpuOperators(found, dtype, epsilon)
