"""Which layers of a target a head reads, and what is said of a target that has no such features.

Also how large the blocks of a DFlash head are that is trained here.

Needs no torch, because the command asks before it loads anything.
"""

from proto.errors import ModelError
from proto.head_kinds import HeadKind, feature_layers

# Of a DFlash head that is trained here: tokens of a block, its first one included, and layers.
BLOCK, NUM_BLOCK_LAYERS = 8, 2


def layers_of(name: str, kind: HeadKind, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose features a head of this kind reads.

    Raises ModelError if the target has too few layers.
    """
    found = feature_layers(kind, {}, num_layers)
    if kind is HeadKind.DFLASH:  # what a low, a middle and a high layer give to the next one
        given = {max(0, at) for at in (1, num_layers // 2 - 1, num_layers - 3)}
        found = tuple(at + 1 for at in sorted(given) if at < num_layers - 1)
    if found:
        return found
    few = "three layers" if kind is HeadKind.EAGLE3 else "a layer below the last"
    what = "EAGLE-3" if kind is HeadKind.EAGLE3 else "DFlash"
    raise ModelError(f"{name}: {what} reads {few}, and it has {num_layers}; use --kind eagle")


def no_features(name: str) -> str:
    """Return the message for a target whose forward gives no hidden states that a head can read."""
    return f"{name}: it hands out no hidden states for a head to read; use a draft model instead"
