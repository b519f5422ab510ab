"""Features: hidden states that a forward hands out beside its logits, for heads that draft.

Layers are named by integers: i >= 0 is what enters decoder layer i (transformers' hidden_states[i];
0 are the embeddings), LAST what comes out of the last norm, which the output matrix multiplies.
Owns what they may be and how those of several layers lie. Knows no head and no backend.
"""

from collections.abc import Mapping

import torch

from engine.errors import ModelError

LAST = -1

Layers = tuple[int, ...]


def check_layers(name: str, num_layers: int, layers: Layers) -> None:
    """Raise ModelError if a model of `num_layers` decoder layers has no such hidden states."""
    for layer in layers:
        if not LAST <= layer < num_layers:
            raise ModelError(
                f"{name}: hidden states of layer {layer} are asked for, but it has 0 to "
                f"{num_layers - 1}, and {LAST} after the last norm; use a head made for this model"
            )


def features_of(states: Mapping[int, torch.Tensor], layers: Layers) -> torch.Tensor | None:
    """Return hidden states side by side, in the order of `layers`; None if there are none.

    states  by layer, [n, hidden_size] each

    Returns [n, len(layers) * hidden_size], of one layer the tensor itself.
    """
    if len(layers) == 1:
        return states[layers[0]]
    return torch.cat([states[layer] for layer in layers], dim=1) if layers else None


def as_bytes(features: torch.Tensor) -> bytes:
    """Rows of features [n, F] as they travel: one behind the other, in their own type."""
    raw: bytes = features.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return raw
