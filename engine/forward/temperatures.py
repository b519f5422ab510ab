"""Llama 4's attention temperatures, by the position that each row of a pass has.

In layers without rotary embedding, Llama 4 multiplies queries by a number that grows with their
position, so that attention stays sharp in long texts. transformers counts these positions from the
length of its cache, as if the rows of a pass were the last tokens of one text. The rows of a tree
are not.
"""

from collections.abc import Mapping
from typing import Any

import torch


def follow_positions(model: Any) -> None:
    """Let a transformers model take these numbers from the `position_ids` that it is called with.

    Does nothing to models of other families, or if it was done before.
    """
    for layer in model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            attention.attn_temperature_tuning = False  # in transformers' own form
            _Temperature(layer, attention)


class _Temperature:
    """Multiplies one layer's queries, which are what `q_proj` returns: such layers have no norm."""

    def __init__(self, layer: Any, attention: Any) -> None:
        self._floor_scale, self._scale = attention.floor_scale, attention.attn_scale
        self._positions: torch.Tensor | None = None  # [lanes, n], of the running pass
        layer.register_forward_pre_hook(self._remember, with_kwargs=True)
        attention.q_proj.register_forward_hook(self._multiply)

    def _remember(self, _layer: Any, _args: Any, options: Mapping[str, Any]) -> None:
        self._positions = options["position_ids"]

    def _multiply(self, _projection: Any, _args: Any, queries: torch.Tensor) -> torch.Tensor:
        assert self._positions is not None, "the layer was called without positions"
        steps = torch.floor((self._positions.float() + 1.0) / self._floor_scale)
        factors = torch.log1p(steps) * self._scale + 1.0
        tuned: torch.Tensor = queries * factors.unsqueeze(-1)
        return tuned.to(queries.dtype)
