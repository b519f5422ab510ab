"""Gated delta rule (Qwen3-Next, Qwen3.5): layers that keep one running state, over slots.

    S_t = a_t S_(t-1) + k_t b_t (v_t - k_t' a_t S_(t-1))'          o_t = q_t' S_t

Each token's key, value, b and a lie in its slot, and so does what its short convolution gives to
later tokens. So the state is no more than a summary of slots. That of a text is kept at the last
*border*, a multiple of STEP tokens that all rows of a pass see, and a row adds the tokens of its
own path behind it. Rejecting drafts therefore costs nothing, and neither does moving or copying: a
state whose slots were written to is dropped, and is made anew of the slots when it is needed.

The modules stay transformers'; where the cache is ours, their forward is this one, and the sums are
made by transformers' own function. Passes of several texts run one text after another.
"""

import sys
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine.forward.cache_tensors import STATE_STEP as STEP
from engine.forward.cache_tensors import ShapeCache, SlotCache
from engine.forward.short_conv import mixed_with

_CLASSES = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")


class _Tokens(NamedTuple):
    """What tokens give to the states behind them: [..., n, heads, dim], [..., n, heads]."""

    keys: torch.Tensor
    values: torch.Tensor
    betas: torch.Tensor
    decays: torch.Tensor


def delta_layers(model: Any) -> list[Any]:
    """Return a model's layers of this kind."""
    return [one for one in model.modules() if type(one).__name__ in _CLASSES]


def keep_in_slots(model: Any) -> None:
    """Let a model's layers of this kind use slots, where the cache has them; done once."""
    for module in delta_layers(model):
        if "forward" not in vars(module):
            module.forward = partial(_forward, module, module.forward)


def num_before(model: Any) -> int:
    """Return how many tokens before a row the layers' convolutions read; 0: there are none."""
    return max((one.conv_kernel_size - 1 for one in delta_layers(model)), default=0)


def _forward(
    module: Any,
    usual: Any,
    hidden_states: torch.Tensor,
    cache_params: Any = None,
    attention_mask: Any = None,
    **more: Any,
) -> torch.Tensor:
    """Return the layer's outputs [1, n, width]; `usual` is transformers' forward."""
    if not isinstance(cache_params, SlotCache | ShapeCache):
        found: torch.Tensor = usual(hidden_states, cache_params, attention_mask, **more)
        return found
    entering, gate, betas, decays = _projected(module, hidden_states)
    heads = module.num_v_heads, module.head_v_dim
    size = module.key_dim + module.value_dim + 2 * module.num_v_heads
    room = entering.new_zeros((1, 1, entering.shape[1], size), dtype=torch.float32)
    seen, _ = cache_params.update(entering[:, None], room, module.layer_idx)
    queries, keys, values = _convolved(module, entering, seen, cache_params)
    given = torch.cat((keys, values, betas, decays), dim=-1).float()
    _, kept = cache_params.update(entering[:, None], given[:, None], module.layer_idx)
    queries = queries.view(*queries.shape[:-1], -1, module.head_k_dim)
    if isinstance(cache_params, SlotCache):
        rows = _Lane(module, cache_params, kept[0, 0]).outputs(queries[0])[None]
    else:
        rows, _ = _run(module, queries, _split(module, given), None)
    normed = module.norm(rows.reshape(-1, heads[1]).to(gate.dtype), gate.reshape(-1, heads[1]))
    made: torch.Tensor = module.out_proj(normed.view(*entering.shape[:2], -1))
    return made


def _projected(
    module: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (queries, keys and values before the convolution, gates, b, logarithms of a)."""
    if hasattr(module, "in_proj_qkvz"):
        parts = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
        q, k, v, gate, b, a = module.fix_query_key_value_ordering(*parts)
        entering = torch.cat([one.flatten(2) for one in (q, k, v)], dim=-1)
    else:
        entering, gate = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
        b, a = module.in_proj_b(hidden), module.in_proj_a(hidden)
    decays = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)
    return entering, gate, b.sigmoid().float(), decays


def _convolved(
    module: Any, entering: torch.Tensor, seen: torch.Tensor, cache: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values behind the convolution, [1, n, ...]."""
    before = cache.before(seen[:, 0]) if isinstance(cache, SlotCache) else None
    mixed = mixed_with(before, entering, module.conv1d)
    mixed = F.silu(mixed).to(entering.dtype)
    sizes = [module.key_dim, module.key_dim, module.value_dim]
    queries, keys, values = torch.split(mixed, sizes, dim=-1)
    return queries, keys, values


def _split(module: Any, given: torch.Tensor) -> _Tokens:
    """Return what slots hold [..., n, size] as parts."""
    sizes = [module.key_dim, module.value_dim, module.num_v_heads, module.num_v_heads]
    keys, values, betas, decays = torch.split(given, sizes, dim=-1)
    by_head = keys.view(*keys.shape[:-1], -1, module.head_k_dim)
    values = values.view(*values.shape[:-1], -1, module.head_v_dim)
    return _Tokens(by_head, values, betas, decays)


def _run(
    module: Any, queries: torch.Tensor, of: _Tokens, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (outputs [B, n, heads, dim], state behind [B, heads, key dim, dim]) of B chains.

    state  before the chains; None: zeros
    """
    rule = sys.modules[type(module).__module__].torch_chunk_gated_delta_rule
    made: tuple[torch.Tensor, torch.Tensor] = rule(
        queries.float(),
        of.keys,
        of.values,
        g=of.decays,
        beta=of.betas,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return made


class _Lane:
    """One text's tokens in a layer, and its state at the last border."""

    def __init__(self, module: Any, cache: SlotCache, kept: torch.Tensor) -> None:
        """Take what the slots that the pass sees hold, [num_visible, size] float32."""
        self._module, self._cache, self._kept = module, cache, kept
        self._key = module.layer_idx, cache.lane

    def outputs(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the outputs [n, heads, dim] of the pass's rows, for queries [n, heads, dim]."""
        state = self._state(self._cache.border)
        if self._cache.is_chain:
            return self._of_chain(queries, state)
        index, are_there = self._cache.path
        tokens = self._kept[index].masked_fill_(are_there.logical_not()[..., None], 0)
        asked = queries.new_zeros(*index.shape, *queries.shape[1:])
        asked[:, -1] = queries
        states = None if state is None else state.expand(len(queries), -1, -1, -1)
        made, _ = _run(self._module, asked, _split(self._module, tokens), states)
        return made[:, -1]

    def _of_chain(self, queries: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs of rows that follow one another, as in a prompt."""
        count = self._cache.count
        first, end, parts = self._cache.first, self._cache.first + count, []
        for start in range(self._cache.border, end, STEP):
            stop = min(start + STEP, end)
            asked = queries.new_zeros(stop - start, *queries.shape[1:])
            begun = max(first, start)
            asked[begun - start :] = queries[begun - first : stop - first]
            made, state = self._run(start, stop, asked, state)
            parts.append(made[begun - start :])
        shape = len(queries) - count, *parts[0].shape[1:]
        return torch.cat((*parts, parts[0].new_zeros(shape)))

    def _state(self, border: int) -> torch.Tensor | None:
        """Return the state behind the first `border` tokens; None: zeros."""
        at, state = self._cache.states.get(self._key, (0, None))
        if at > border:
            at, state = 0, None
        if at < border:
            heads = self._module.num_k_heads, self._module.head_k_dim
            _, state = self._run(at, border, self._kept.new_zeros(border - at, *heads), state)
        return state

    def _run(
        self, start: int, stop: int, queries: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the tokens [start, stop) of the text, and keep the state if it is at a border."""
        of = _split(self._module, self._kept[None, start:stop])
        made, state = _run(self._module, queries[None], of, state)
        known, _ = self._cache.states.get(self._key, (0, None))
        if stop % STEP == 0 and stop > known:
            self._cache.states[self._key] = stop, state
        return made[0], state
