"""Whether a head was made for its target, by their config.json and the sizes of its tensors."""

import re
from collections.abc import Mapping
from typing import Any

from coordinator.api.models.folders import Checkpoint
from proto.errors import ModelError, shown
from proto.heads import HeadKind, feature_layers

FIX = "use a head made for this target"
_SQUARE = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.linear\.weight")  # [hidden_size, hidden_size]

_FIRST = re.compile(r"(model\.)?(fc|fusion_fc)\.weight")


def check_head(head: Checkpoint, kind: HeadKind | None, target: Checkpoint) -> None:
    """Raises ModelError if it is none, or of a target of other sizes, as far as that is stated.

    kind  as its files say; None: they say of none
    """
    if kind is None:
        raise ModelError(
            f"{head.config}: it describes no head that is covered; use one of Medusa, EAGLE or "
            "EAGLE-3"
        )
    if kind is HeadKind.MEDUSA:
        _check_medusa(head, target)
    else:
        _check_eagle(head, kind, target)
    head.check_head_config(kind)
    shapes = head.head_shapes()
    if kind is not HeadKind.MEDUSA and shapes and not any(map(_FIRST.fullmatch, shapes)):
        raise ModelError(
            f"{head.folder}: it lacks the tensor fc.weight, the first matrix of an EAGLE head; it "
            "is incomplete, or no head: get it again"
        )


def _check_medusa(head: Checkpoint, target: Checkpoint) -> None:
    size = target.number("hidden_size")
    for name, shape in head.head_shapes().items():
        if size is not None and _SQUARE.fullmatch(name) and shape != (size, size):
            raise ModelError(
                f"{head.folder}: {name} is {list(shape)}, and the hidden size of {target.name} is "
                f"{size}; {FIX}"
            )


def _check_eagle(head: Checkpoint, kind: HeadKind, target: Checkpoint) -> None:
    inner = head.stated.get("transformer_layer_config")
    part: Mapping[str, Any] = inner if isinstance(inner, dict) else head.stated
    _check_field(head, part, "vocab_size", target, "vocab_size")
    if kind is HeadKind.EAGLE3 and head.stated.get("target_hidden_size") is not None:
        _check_field(head, head.stated, "target_hidden_size", target, "hidden_size")
    else:
        _check_field(head, part, "hidden_size", target, "hidden_size")
    num_layers = target.number("num_hidden_layers")
    if num_layers is not None and not feature_layers(kind, head.stated, num_layers):
        raise ModelError(
            f"{head.config}: it reads features of layers that {target.name}, which has "
            f"{num_layers}, does not have; {FIX}"
        )


def _check_field(
    head: Checkpoint, stated: Mapping[str, Any], field: str, target: Checkpoint, of_target: str
) -> None:
    found, wanted = stated.get(field), target.number(of_target)
    if found is not None and wanted is not None and found != wanted:
        raise ModelError(
            f"{head.config}: {field} is {shown(found)}, but that of {target.name} is {wanted}; "
            f"{FIX}"
        )
