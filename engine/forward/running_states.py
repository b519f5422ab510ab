"""Layers that keep one running state: the state is a summary of slots.

What a token gives to the states behind it lies in its slot, and so does what its short convolution
gives to later tokens. The state of a text is kept at the last *border*, a multiple of STEP tokens
that all rows of a pass see, and a row adds the tokens of its own path behind it. Rejecting drafts
therefore costs nothing, and neither does moving or copying: a state whose slots were written to is
dropped, and is made anew of the slots when it is needed (`SlotCache.note`).

How tokens become a state is a `Rule`: the gated delta rule (`delta_rule.py`) or Mamba 2's
(`mamba2.py`).
"""

from typing import Any, Protocol

import torch

from engine.forward.cache_tensors import STATE_STEP as STEP
from engine.forward.cache_tensors import ShapeCache, SlotCache
from engine.forward.short_conv import mixed_with

Cache = SlotCache | ShapeCache

FLOAT32_BYTES = 4


class Rule(Protocol):
    """Says what rows read of the tokens before them, and which state these leave."""

    def __call__(
        self, queries: torch.Tensor, given: torch.Tensor, state: Any, *, goes_on: bool
    ) -> tuple[torch.Tensor, Any]:
        """Run B chains of n tokens; return (outputs [B, q, heads, dim], the state behind).

        queries  [B, q, ...]: of the last q tokens of each chain, as many as outputs are wanted
        given    [B, n, size] float32: what the tokens give; zeros are no token
        state    before all of the chains; None: there is nothing before
        goes_on  True: the state behind the chain is wanted, and B is 1; else it may be anything
        """


def convolved(
    entering: torch.Tensor, conv: Any, size: int, cache: Cache, place: int
) -> torch.Tensor:
    """Write a layer's inputs to their slots; return its convolution's sums, float32 [1, n, width].

    entering  [1, n, width]: what enters the convolution
    size      number of numbers that each token will give to the states behind it (`summed`)
    place     which layer of the cache this one has
    """
    room = entering.new_zeros((1, 1, entering.shape[1], size), dtype=torch.float32)
    seen, _ = cache.update(entering[:, None], room, place)
    before = cache.before(seen[:, 0]) if isinstance(cache, SlotCache) else None
    return mixed_with(before, entering, conv)


def summed(
    rule: Rule,
    queries: torch.Tensor,
    given: torch.Tensor,
    entering: torch.Tensor,
    cache: Cache,
    place: int,
) -> torch.Tensor:
    """Write what the rows give to their slots; return their outputs [1, n, heads, dim] float32.

    queries  [1, n, ...], as the rule takes them
    given    [1, n, size] float32
    entering, place  as in `convolved`
    """
    _, kept = cache.update(entering[:, None], given[:, None], place)
    if isinstance(cache, SlotCache):
        return _Lane(rule, cache, place, kept[0, 0]).outputs(queries[0])[None]
    rows, _ = rule(queries, given, None, goes_on=False)
    return rows


class _Lane:
    """One text's tokens in a layer, and its state at the last border."""

    def __init__(self, rule: Rule, cache: SlotCache, place: int, kept: torch.Tensor) -> None:
        """Take what the slots that the pass sees hold, [num_visible, size] float32."""
        self._rule, self._cache, self._kept = rule, cache, kept
        self._key = place, cache.lane

    def outputs(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the outputs [n, heads, dim] of the pass's rows, for queries [n, ...]."""
        state = self._state(self._cache.border, queries[:0])
        if self._cache.is_chain:
            return self._of_chain(queries, state)
        index, are_there = self._cache.path
        tokens = self._kept[index].masked_fill_(are_there.logical_not()[..., None], 0)
        made, _ = self._rule(queries[:, None], tokens, state, goes_on=False)
        return made[:, 0]

    def _of_chain(self, queries: torch.Tensor, state: Any) -> torch.Tensor:
        """Return the outputs of rows that follow one another, as in a prompt."""
        count = self._cache.count
        first, end, parts = self._cache.first, self._cache.first + count, []
        for start in range(self._cache.border, end, STEP):
            stop, begun = min(start + STEP, end), max(first, start)
            asked = queries[begun - first : stop - first]
            made, state = self._run(start, stop, asked, state)
            parts.append(made)
        shape = len(queries) - count, *parts[0].shape[1:]
        return torch.cat((*parts, parts[0].new_zeros(shape)))

    def _state(self, border: int, nothing: torch.Tensor) -> Any:
        """Return the state behind the first `border` tokens; None: there are none.

        nothing  queries of no row
        """
        at, state = self._cache.states.get(self._key, (0, None))
        if at > border:
            at, state = 0, None
        if at < border:
            _, state = self._run(at, border, nothing, state)
        return state

    def _run(
        self, start: int, stop: int, queries: torch.Tensor, state: Any
    ) -> tuple[torch.Tensor, Any]:
        """Run the tokens [start, stop) of the text, and keep the state if it is at a border."""
        given = self._kept[None, start:stop]
        made, state = self._rule(queries[None], given, state, goes_on=True)
        known, _ = self._cache.states.get(self._key, (0, None))
        if stop % STEP == 0 and stop > known:
            self._cache.states[self._key] = stop, state
        return made[0], state
