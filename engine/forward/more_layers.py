"""The layers that are no attention and keep what they need of a token in the token's slot."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch

from engine.forward import (
    delta_rule,
    kimi_delta,
    lightning,
    mamba1,
    mamba2,
    recurrent_unit,
    short_conv,
)
from engine.forward.cache_tensors import ShapeCache, SlotCache


class Kind(Protocol):
    """A kind of such layers: one of the files that `_KINDS` names."""

    @property
    def CLASSES(self) -> tuple[str, ...]:
        """Return the names of transformers' classes of these layers."""

    @property
    def BESIDE_ATTENTION(self) -> bool:
        """True: some of these layers are beside attention, which has their place in the cache."""

    @property
    def CONVOLUTION(self) -> str:
        """Return the name of a layer's convolution over the tokens before each row; "": none."""

    def state_bytes(self, module: Any) -> int:
        """Return the bytes of the state that such a layer keeps of a text."""

    def forward(self, module: Any, place: int, hidden_states: torch.Tensor, cache: Any, /) -> Any:
        """Return what transformers' layer does, mostly the outputs [lanes, n, width].

        place  which layer of the cache this one has
        cache  of ours, or the one that learns shapes
        """


_STATES: tuple[Kind, ...] = (*(delta_rule, kimi_delta, lightning, mamba1, mamba2, recurrent_unit),)
_KINDS: tuple[Kind, ...] = (short_conv, *_STATES)


def more_in_slots(model: Any) -> int:
    """Let such layers of a model use slots; return how many tokens before a row they read.

    0: the model has none. It is done once, and before the model's cache is measured.
    """
    found = 0
    num_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    for number, module, kind in _layers(model, _KINDS):
        if "forward" not in vars(module):
            place = number + kind.BESIDE_ATTENTION * num_layers
            module.forward = partial(_forward, kind, module, module.forward, place)
        found = max(found, 1)  # so that the cache finds the paths of rows
        if kind.CONVOLUTION:
            found = max(found, getattr(module, kind.CONVOLUTION).weight.shape[-1] - 1)
    return found


def _forward(
    kind: Kind,
    module: Any,
    usual: Any,
    place: int,
    hidden_states: torch.Tensor,
    *more: Any,
    **named: Any,
) -> Any:
    """Return a layer's outputs: ours where the cache is, else transformers'.

    usual  transformers' forward
    place  which layer of the cache this one has
    """
    for one in (*more, *named.values()):
        if isinstance(one, SlotCache | ShapeCache):
            return kind.forward(module, place, hidden_states, one)
    return usual(hidden_states, *more, **named)


def state_bytes(model: Any) -> int:
    """Return the bytes of all states that a model keeps of one text, whatever its length."""
    return sum(kind.state_bytes(module) for _, module, kind in _layers(model, _KINDS))


def has_states(model: Any) -> bool:
    """True if a model has layers that keep a running state."""
    return next(_layers(model, _STATES), None) is not None


def _layers(model: Any, kinds: tuple[Kind, ...]) -> Iterator[tuple[int, Any, Kind]]:
    """Yield a model's layers of these kinds: number of the layer, module, kind."""
    for name, module in model.named_modules():
        for kind in kinds:
            if type(module).__name__ in kind.CLASSES:
                yield next(int(part) for part in name.split(".") if part.isdigit()), module, kind
