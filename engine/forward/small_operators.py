"""The small operators of a layer, merged into a few kernels: for recorded passes on GPUs.

Theory of operation
-------------------
Beside its matrix products and its attention, a layer of the llama family is some thirteen operators
that each read and write a few rows. Such an operator costs a GPU two or three microseconds however
little it does, so what counts is how many there are. Here they are three plain functions, of which
torch.compile makes few kernels:

    add_and_norm    the residual sum, and its norm for the next matrix product: one kernel
    turn_and_write  norms of heads if there are any, and the rotary embedding; keys and values go
                    into the cache, queries into the layout that attention takes: two kernels
    gate            silu of one half times the other half: one kernel

Programs are compiled at load alone. Those for one row have that number built in, all others serve
any number of rows. Each shape of a pass is held to the operators one by one, on random numbers,
before it may use them. What a program computes is rounded to the model's type wherever the
operators one by one round it.

Owns the programs and their check. Knows no layer, no attention and no model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as once
from typing import Any, cast

import torch
import torch.nn.functional as F

from engine.checkpoint.files import one_line
from engine.errors import ModelError
from engine.forward.forward import Shape
from engine.forward.operators import at_once, rms_norm

MERGED_DEVICES = ("cuda",)  # on a CPU a call of a program takes as long as the operators it merges
_MOST_PROGRAMS = 64  # of each function: those for one row and for several, by lanes
# Largest difference from the operators one by one, relative to the largest number: the order of a
# sum may differ, and with it whether a number is rounded up or down.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}

_SETTINGS: dict[str, str | int | bool | Callable[..., Any]] = {
    "emulate_precision_casts": True,  # round where the operators one by one do
    "split_reductions": False,  # a norm is one kernel, however wide the model is
    # Nothing is timed to find a kernel's sizes: that would copy a layer's cache again and again,
    # and ranks might find different ones, which sum in different orders.
    "deterministic": True,
    "triton.autotune_pointwise": False,
    "triton.cudagraphs": False,  # programs become part of our own recordings
}

Program = Callable[..., Any]
Sum = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Trial:
    """Random inputs of all three functions, for passes of one shape, on the model's device.

    hidden, change  [lanes * n, hidden]
    weight    [hidden] of a norm
    gate_up   [lanes * n, 2 * intermediate]
    qkv, weights, cos, sin, slots  as for `SmallOperators.turn_and_write`
    cache     [2 kv_heads, slots, dim]: zeros
    """

    hidden: torch.Tensor
    change: torch.Tensor
    weight: torch.Tensor
    gate_up: torch.Tensor
    qkv: torch.Tensor
    weights: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    cache: torch.Tensor


class SmallOperators:
    """The programs of a model whose norms all have the same epsilon."""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self._is_making = False
        self.made: set[Shape] = set()  # shapes of passes that may use them

    def make(self, shape: Shape, trial: Trial, one_by_one: Callable[[Trial], torch.Tensor]) -> None:
        """Compile what passes of `shape` need, and hold it to the operators one by one.

        one_by_one  what `turn_and_write` does, operator by operator

        Raises:
            ModelError: it cannot be compiled here, or computes something else.
        """
        # It takes seconds to import, which only whoever compiles has to pay.
        import torch._dynamo
        import torch._inductor.config

        self._is_making = True
        try:
            with (
                torch._dynamo.config.patch(recompile_limit=_MOST_PROGRAMS),
                # In this process: workers of a pool would outlive what they are for.
                torch._inductor.config.patch(compile_threads=1),
            ):
                error = self._error(shape, trial, one_by_one)
        except Exception as failure:  # whatever compilers raise: the operators one by one do it too
            raise ModelError(f"they cannot be compiled ({one_line(failure)})") from failure
        finally:
            self._is_making = False
        if not error <= _TOLERANCES[trial.hidden.dtype]:
            raise ModelError(f"they give other numbers (relative error {error:.1e})")
        self.made.add(shape)

    def add_and_norm(self, hidden: torch.Tensor, change: torch.Tensor, weight: torch.Tensor) -> Sum:
        """See the function of that name."""
        self._mark(0, hidden, change)
        return cast(Sum, _compiled(add_and_norm)(hidden, change, weight, self.epsilon))

    def turn_and_write(
        self,
        shape: Shape,
        qkv: torch.Tensor,
        weights: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        """See the function of that name; what has rows comes without the division into lanes.

        qkv       [lanes * n, (heads + 2 kv_heads) * dim]
        cos, sin  [lanes * n, 1, dim]
        slots     [lanes * n] int64
        """
        dim = cache.shape[2]
        by_lane = [part.view(*shape, -1, dim) for part in (qkv, cos, sin)]
        by_lane.append(slots.view(shape))
        self._mark(1, *by_lane)
        heads, cosines, sines, where = by_lane
        program = _compiled(turn_and_write)
        found = program(heads, weights, cosines, sines, where, cache, self.epsilon)
        return cast(torch.Tensor, found)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See the function of that name."""
        self._mark(0, gate_up)
        return cast(torch.Tensor, _compiled(gate)(gate_up))

    def _mark(self, dim: int, *of_rows: torch.Tensor) -> None:
        """While programs are made: let those of several rows serve any number of them."""
        if self._is_making and of_rows[0].shape[dim] > 1:
            for part in of_rows:
                torch._dynamo.mark_dynamic(part, dim)

    def _error(
        self, shape: Shape, trial: Trial, one_by_one: Callable[[Trial], torch.Tensor]
    ) -> float:
        """The largest difference, relative to the largest number of the same output."""
        total, normed = self.add_and_norm(trial.hidden, trial.change, trial.weight)
        want = trial.hidden + trial.change
        norm = rms_norm(trial.weight, self.epsilon, at_once)
        first, second = trial.gate_up.chunk(2, dim=-1)
        pairs = [(total, want), (normed, norm(want))]
        pairs.append((self.gate(trial.gate_up), F.silu(first).mul_(second)))
        inputs = trial.qkv, trial.weights, trial.cos, trial.sin, trial.slots, trial.cache
        queries = self.turn_and_write(shape, *inputs)
        written = trial.cache.index_select(1, trial.slots)
        if trial.cache.index_fill_(1, trial.slots, 0).any():
            return float("inf")  # something lies where nothing belongs
        pairs.append((queries, one_by_one(trial)))
        pairs.append((written, trial.cache.index_select(1, trial.slots)))
        errors = [(got - want).abs().amax() / want.abs().amax() for got, want in pairs]
        return float(torch.stack(errors).amax())  # of which NaN is the largest


@once
def _compiled(function: Program) -> Program:
    return torch.compile(function, fullgraph=True, dynamic=False, options=_SETTINGS)


# -- what is compiled ------------------------------------------------------------------------------


def add_and_norm(
    hidden: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> Sum:
    """Return the sum [n, hidden], and its root-mean-square norm with `weight` [hidden]."""
    hidden = hidden + change
    return hidden, F.rms_norm(hidden, hidden.shape[-1:], weight, epsilon)


def turn_and_write(
    qkv: torch.Tensor,
    weights: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """Write keys and values to the cache; return the queries [lanes, kv_heads, n * group, dim].

    qkv       [lanes, n, heads + 2 kv_heads, dim]: queries, keys and values
    weights   [heads + 2 kv_heads, dim] of the norms of queries and keys, then whatever is finite;
              None: there are no such norms
    cos, sin  [lanes, n, 1, dim] of each row's position; sin is negative in its first half
    slots     [lanes, n] int64
    cache     [2 kv_heads, slots, dim]: keys, then values
    """
    num_lanes, num_rows, num_heads, dim = qkv.shape
    for of_rows in (cos, sin, slots):  # or a compiler does not know that these are the same
        torch._check(of_rows.shape[1] == num_rows)  # type: ignore[no-untyped-call]
    num_keys = len(cache) // 2
    num_queries = num_heads - 2 * num_keys
    of_queries = of_keys = None
    if weights is not None:
        of_queries = weights[:num_queries].view(num_keys, 1, -1, dim)
        of_keys = weights[num_queries:]
    # Values are turned with the keys and then left as they were: so both go into one kernel.
    written = qkv[:, :, num_queries:]
    keys = _turned(_normed(written, of_keys, epsilon), cos, sin)
    heads = torch.arange(2 * num_keys, device=slots.device)
    written = torch.where(heads[:, None] < num_keys, keys, written)
    # By index: what is written to a part of the cache would be copied back whole.
    cache.index_put_((heads, slots[:, :, None]), written)
    # In the order in which they are wanted from the first operator on: else they are copied again.
    queries = qkv[:, :, :num_queries].view(num_lanes, num_rows, num_keys, -1, dim).transpose(1, 2)
    queries = _normed(queries, of_queries, epsilon)
    queries = _turned(queries, cos[:, None], sin[:, None])
    return queries.reshape(num_lanes, num_keys, -1, dim)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu of the first half, times the second half, [n, intermediate]."""
    first, second = gate_up.chunk(2, dim=-1)
    return F.silu(first) * second


def _normed(x: torch.Tensor, weights: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    return x if weights is None else F.rms_norm(x, x.shape[-1:], None, epsilon) * weights


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the rotary embedding of heads [lanes, n, heads, dim]."""
    # To flip halves is another order of reading; to cut them out and join them is another kernel.
    swapped = x.view(*x.shape[:-1], 2, -1).flip(-2).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin)
