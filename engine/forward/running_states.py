"""Layers that keep one running state: the state is a summary of slots.

What a token gives to the states behind it lies in its slot, and so does what its short convolution
gives to later tokens. The state of a text is kept behind the committed tokens that all rows of a
pass see (its *end*), and a row adds the tokens of its own path behind these. Rejecting drafts
therefore costs nothing, and neither does moving or copying: a state whose slots were written to is
dropped, and is made anew of the slots when it is needed (`SlotCache.note`). So that this is cheap,
a second state is kept at the last *border*, a multiple of STEP tokens.

How tokens become a state is a `Rule`, of which there is one for each mechanism (`more_layers.py`).
"""

from collections.abc import Iterator
from operator import itemgetter
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
    """One text's tokens in a layer, and its states: at the last border, and at its end."""

    def __init__(self, rule: Rule, cache: SlotCache, place: int, kept: torch.Tensor) -> None:
        """Take what the slots that the pass sees hold, [num_visible, size] float32."""
        self._rule, self._cache, self._kept = rule, cache, kept
        self._at_border = place, cache.lane
        self._at_end = -1 - place, cache.lane

    def outputs(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the outputs [n, heads, dim] of the pass's rows, for queries [n, ...]."""
        cache, stop = self._cache, self._cache.committed
        start, state = self._nearest(stop)
        for _, made in self._run(start, stop, queries[:0], stop, state):
            state = made
        if stop % STEP:
            cache.states[self._at_end] = stop, state
        if cache.is_chain:
            end = cache.first + cache.count
            parts = [rows for rows, _ in self._run(stop, end, queries, cache.first, state)]
            shape = len(queries) - cache.count, *parts[0].shape[1:]
            return torch.cat((*parts, parts[0].new_zeros(shape)))
        index, are_there = cache.path
        tokens = self._kept[index].masked_fill_(are_there.logical_not()[..., None], 0)
        made, _ = self._rule(queries[:, None], tokens, state, goes_on=False)
        return made[:, 0]

    def _nearest(self, end: int) -> tuple[int, Any]:
        """Return (its tokens, state) of the longest known beginning of at most `end` tokens."""
        keys = (self._at_border, self._at_end)
        known = [self._cache.states[key] for key in keys if key in self._cache.states]
        return max((one for one in known if one[0] <= end), key=itemgetter(0), default=(0, None))

    def _run(
        self, start: int, end: int, queries: torch.Tensor, first: int, state: Any
    ) -> Iterator[tuple[torch.Tensor, Any]]:
        """Run the tokens [start, end) of the text in parts that end at borders; keep these states.

        Yields of each part the outputs of the rows in it, and the state behind it.

        queries  of the rows from position `first` on
        state    before the tokens
        """
        while start < end:
            stop = min(start // STEP * STEP + STEP, end)
            asked = queries[max(start - first, 0) : max(stop - first, 0)]
            given = self._kept[None, start:stop]
            made, state = self._rule(asked[None], given, state, goes_on=True)
            known, _ = self._cache.states.get(self._at_border, (0, None))
            if stop % STEP == 0 and stop > known:
                self._cache.states[self._at_border] = stop, state
            yield made[0], state
            start = stop
