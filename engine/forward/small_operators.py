"""The small operators of a layer, merged into a few kernels by torch.compile, for GPUs.

Theory of operation
-------------------
Beside its matrix products and its attention, a layer of the llama family has some thirteen
operators that each read and write a few rows. Such an operator costs a GPU two or three
microseconds however little it does, so their number counts. Here they are three plain functions,
which torch.compile turns into four kernels:

    add_and_norm    the residual sum, and its norm for the next matrix product: one kernel, also
                    where the product before it left partial sums (`few_rows.py`)
    turn_and_write  norms of heads if there are any, and the rotary embedding; keys and values go
                    into the cache, queries into the layout that attention takes: two kernels
    gate            silu of one half times the other half: one kernel

Programs are compiled only at load. Those for one row have that number built in; all others serve
any number of rows. Before passes of a shape may use the programs, their results on random numbers
are compared with those of the single operators. A program rounds to the model's dtype wherever the
single operators do.

Owns the programs and their check. Knows no layer, no attention and no model. Used by recorded
passes (CUDA graphs) only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as once
from typing import Any, cast

import torch
import torch.nn.functional as F

from engine.checkpoint.files import one_line
from engine.errors import ModelError
from engine.forward.few_rows import whole
from engine.forward.forward import Shape
from engine.forward.operators import at_once, rms_norm

MERGED_DEVICES = ("cuda",)  # on a CPU calling a program takes as long as the operators it merges
_MOST_PROGRAMS = 64  # per function: one for one row and one for several rows, per number of lanes
# Largest difference from the single operators, relative to the largest number: the order of a sum
# may differ, and so may the rounding.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}

_SETTINGS: dict[str, str | int | bool | Callable[..., Any]] = {
    "emulate_precision_casts": True,  # round where the single operators do
    "split_reductions": False,  # a norm is one kernel, however wide the model is
    # Kernel sizes are not timed: timing would copy a layer's cache again and again, and ranks might
    # choose different sizes, which sum in different orders.
    "deterministic": True,
    "triton.autotune_pointwise": False,
    "triton.cudagraphs": False,  # programs become part of our own recordings
}

Program = Callable[..., Any]
Sum = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Trial:
    """Random inputs for checking all three functions, for passes of one shape, on the device.

    hidden   [lanes * n, hidden]: input of `add_and_norm`
    changes  its second input: [lanes * n, hidden], and float32 partial sums
             [split, lanes * n, hidden] for each `split` that products have
    weight    [hidden]: weight of a norm
    gate_up   [lanes * n, 2 * intermediate]
    qkv, weights, cos, sin, slots  as for `SmallOperators.turn_and_write`
    cache     [2 kv_heads, slots, dim]: zeros
    """

    hidden: torch.Tensor
    changes: tuple[torch.Tensor, ...]
    weight: torch.Tensor
    gate_up: torch.Tensor
    qkv: torch.Tensor
    weights: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    cache: torch.Tensor


class SmallOperators:
    """Compiled `add_and_norm`, `turn_and_write` and `gate`, for norms with one epsilon.

    made  shapes of passes for which the programs were compiled and checked
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self._is_making = False
        self.made: set[Shape] = set()

    def make(self, shape: Shape, trial: Trial, one_by_one: Callable[[Trial], torch.Tensor]) -> None:
        """Compile the programs for passes of `shape`, and check them against the single operators.

        one_by_one  function that does the same as `turn_and_write` with single operators, and
                    returns its result

        Raises:
            ModelError: the programs cannot be compiled here, or compute other numbers.
        """
        # Imported here, because the import takes seconds.
        import torch._dynamo
        import torch._inductor.config

        self._is_making = True
        try:
            with (
                torch._dynamo.config.patch(recompile_limit=_MOST_PROGRAMS),
                # Compile in this process: worker processes would outlive the compilation.
                torch._inductor.config.patch(compile_threads=1),
            ):
                error = self._error(shape, trial, one_by_one)
        except Exception as failure:  # compilers may raise anything; the single operators remain
            raise ModelError(f"they cannot be compiled ({one_line(failure)})") from failure
        finally:
            self._is_making = False
        if not error <= _TOLERANCES[trial.hidden.dtype]:
            raise ModelError(f"they give other numbers (relative error {error:.1e})")
        self.made.add(shape)

    def add_and_norm(self, hidden: torch.Tensor, change: torch.Tensor, weight: torch.Tensor) -> Sum:
        """Return (hidden + change, RMS norm of that sum), by the compiled program.

        change  [n, hidden], or float32 partial sums of it [split, n, hidden]
        """
        self._mark(0, hidden)
        self._mark(change.dim() - 2, change)
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
        """Norm and rotate queries and keys, write the cache; return queries, by compiled program.

        qkv       [lanes * n, (heads + 2 kv_heads) * dim]
        cos, sin  [lanes * n, 1, dim]
        slots     [lanes * n] int64

        The inputs are not divided into lanes.
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
        """Return silu(first half) * second half of `gate_up`, by the compiled program."""
        self._mark(0, gate_up)
        return cast(torch.Tensor, _compiled(gate)(gate_up))

    def _mark(self, dim: int, *of_rows: torch.Tensor) -> None:
        """While compiling, mark dimension `dim` of several rows as dynamic: any number will do."""
        if self._is_making and of_rows[0].shape[dim] > 1:
            for part in of_rows:
                torch._dynamo.mark_dynamic(part, dim)

    def _error(
        self, shape: Shape, trial: Trial, one_by_one: Callable[[Trial], torch.Tensor]
    ) -> float:
        """Return the largest difference from single operators, relative to the largest output."""
        norm = rms_norm(trial.weight, self.epsilon, at_once)
        pairs = []
        for change in trial.changes:
            total, normed = self.add_and_norm(trial.hidden, change, trial.weight)
            want = trial.hidden + whole(change, trial.hidden.dtype)
            pairs += [(total, want), (normed, norm(want))]
        first, second = trial.gate_up.chunk(2, dim=-1)
        pairs.append((self.gate(trial.gate_up), F.silu(first).mul_(second)))
        inputs = trial.qkv, trial.weights, trial.cos, trial.sin, trial.slots, trial.cache
        queries = self.turn_and_write(shape, *inputs)
        written = trial.cache.index_select(1, trial.slots)
        if trial.cache.index_fill_(1, trial.slots, 0).any():
            return float("inf")  # the program wrote to other slots
        pairs.append((queries, one_by_one(trial)))
        pairs.append((written, trial.cache.index_select(1, trial.slots)))
        errors = [(got - want).abs().amax() / want.abs().amax() for got, want in pairs]
        return float(torch.stack(errors).amax())  # NaN if any of them is NaN


@once
def _compiled(function: Program) -> Program:
    return torch.compile(function, fullgraph=True, dynamic=False, options=_SETTINGS)


# -- what is compiled ------------------------------------------------------------------------------


def add_and_norm(
    hidden: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> Sum:
    """Return hidden + change [n, hidden], and the RMS norm of the sum with `weight` [hidden].

    change  [n, hidden], or float32 partial sums of it [split, n, hidden]
    """
    hidden = hidden + whole(change, hidden.dtype)
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
    """Norm and rotate queries and keys; write keys and values to the cache; return the queries.

    The queries are [lanes, kv_heads, n * group, dim].

    qkv       [lanes, n, heads + 2 kv_heads, dim]: queries, keys and values
    weights   [heads + 2 kv_heads, dim]: weights of the norms of queries and keys, then any finite
              numbers for the values; None: the model has no such norms
    cos, sin  [lanes, n, 1, dim] of each row's position; sin is negative in its first half
    slots     [lanes, n] int64
    cache     [2 kv_heads, slots, dim]: keys, then values
    """
    num_lanes, num_rows, num_heads, dim = qkv.shape
    for of_rows in (cos, sin, slots):  # tells the compiler that these dimensions are equal
        torch._check(of_rows.shape[1] == num_rows)  # type: ignore[no-untyped-call]
    num_keys = len(cache) // 2
    num_queries = num_heads - 2 * num_keys
    of_queries = of_keys = None
    if weights is not None:
        of_queries = weights[:num_queries].view(num_keys, 1, -1, dim)
        of_keys = weights[num_queries:]
    # Values are rotated with the keys and the result is dropped: so one kernel does both.
    written = qkv[:, :, num_queries:]
    keys = _turned(_normed(written, of_keys, epsilon), cos, sin)
    heads = torch.arange(2 * num_keys, device=slots.device)
    written = torch.where(heads[:, None] < num_keys, keys, written)
    # `index_put_` on the whole cache: after a write to a view the whole cache would be copied back.
    cache.index_put_((heads, slots[:, :, None]), written)
    # Transposed before the first operator, so that no further copy is needed at the end.
    queries = qkv[:, :, :num_queries].view(num_lanes, num_rows, num_keys, -1, dim).transpose(1, 2)
    queries = _normed(queries, of_queries, epsilon)
    queries = _turned(queries, cos[:, None], sin[:, None])
    return queries.reshape(num_lanes, num_keys, -1, dim)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of `gate_up` [n, 2 * intermediate]."""
    first, second = gate_up.chunk(2, dim=-1)
    return F.silu(first) * second


def _normed(x: torch.Tensor, weights: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Return the RMS norm of heads, times `weights`; without weights `x` itself."""
    return x if weights is None else F.rms_norm(x, x.shape[-1:], None, epsilon) * weights


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return heads [lanes, n, heads, dim] with the rotary embedding applied."""
    # Flipping the halves only changes the order of reading; cutting and joining is another kernel.
    swapped = x.view(*x.shape[:-1], 2, -1).flip(-2).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin)
