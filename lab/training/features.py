"""Which layers of a target a head reads, and what is said of a target that has no such features.

Needs no torch, because the command asks before it loads anything.
"""

from proto.errors import ModelError
from proto.head_kinds import HeadKind, feature_layers


def layers_of(name: str, kind: HeadKind, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose features a head of this kind reads.

    Raises ModelError if the target has too few layers.
    """
    if layers := feature_layers(kind, {}, num_layers):
        return layers
    raise ModelError(
        f"{name}: EAGLE-3 reads three layers, and it has {num_layers}; use --kind eagle"
    )


def no_features(name: str) -> str:
    """Return the message for a target whose forward gives no hidden states that a head can read."""
    return f"{name}: it hands out no hidden states for a head to read; use a draft model instead"
