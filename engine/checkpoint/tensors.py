"""Check that the tensors of a checkpoint are those that its config.json describes.

Names and shapes come from the headers of the files (`files.py`), before any memory is taken for
weights: a wrong number in config.json must not allocate terabytes.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.files import COMPUTED, Object, Shapes, fields_with
from engine.errors import ModelError
from proto.head_kinds import JOINED, num_mtp_layers

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def check_shapes(path: Path, stated: Object, model: Any, shapes: Shapes) -> None:
    """Raise ModelError if a checkpoint's tensors have other shapes than the model's.

    path    path of config.json, for messages
    stated  the content of config.json
    model   the model made from it, on `meta` (without memory)
    shapes  name -> shape of the checkpoint's tensors

    Raises:
        ModelError: a tensor has another size than config.json says, or the model would need much
            more memory than the checkpoint has numbers.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in shapes.items():
        wanted = expected.get(name) or expected.get(f"{model.base_model_prefix}.{name}")
        # Some tensors are transposed when they are read, so the order of sizes does not matter.
        if wanted is None or sorted(wanted) == sorted(shape):
            continue
        odd = [size for size in wanted if size not in shape]
        fields = dict.fromkeys(field for size in odd for field in fields_with(stated, size))
        of = f" ({', '.join(fields)})" if fields else ""
        raise ModelError(
            f"{path}: by its sizes{of} {name} is {list(wanted)}, in the checkpoint it is "
            f"{list(shape)}; one of the two is of another model"
        )
    there = sum(map(math.prod, shapes.values()))
    needed = sum(weight.numel() for weight in model.parameters())
    if needed > 2 * there:
        raise ModelError(
            f"{path}: it describes a model of {needed} weights, the checkpoint has {there}; one of "
            "them is incomplete"
        )


def refuse_mismatched(path: Path, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Raise ModelError if transformers found a tensor with another shape than the model's.

    For tensors whose shape is known only after transformers has converted them.

    path        path of config.json, for messages
    mismatched  (name, shape in the checkpoint, shape in the model) of each such tensor
    """
    for name, found, wanted in sorted(mismatched)[:1]:
        raise ModelError(
            f"{path}: by its sizes {name} is {list(wanted)}, in the checkpoint it is "
            f"{list(found)}; one of the two is of another model"
        )


def refuse_missing(path: Path, missing: Iterable[str]) -> None:
    """Raise ModelError if the model has tensors that the checkpoint lacks: they would be random."""
    names = sorted(missing)
    if names:
        raise ModelError(
            f"{path}: the checkpoint lacks {len(names)} tensors of this model, {names[0]} first; "
            "it is incomplete: get it again"
        )


def refuse_unexpected(path: Path, model: Any, unexpected: Iterable[str]) -> None:
    """Raise ModelError if the checkpoint has tensors of the model that config.json leaves out.

    These are further layers, biases or norms; without them it would be another model. Whole parts
    beside the language model (a vision tower, a value head) are accepted and not read, and so are
    its layers for multi-token prediction, which follow those of the model itself.

    path        path of config.json, for messages
    unexpected  names of the tensors that transformers did not use, without those that it knows to
                be superfluous
    """
    own = {_pattern(name) for name in model.state_dict()}
    inside = {name.rpartition(".")[0] for name in own}
    inside |= {name[: name.rindex("#") + 2] for name in own if "#" in name}
    prefix = f"{model.base_model_prefix}."

    def belongs(name: str) -> bool:
        for pattern in (_pattern(name), _pattern(prefix + name)):
            block = pattern[: pattern.rindex("#") + 2] if "#" in pattern else ""
            if pattern.rpartition(".")[0] in inside or block in inside:
                return True
        return False

    config = model.config.get_text_config(decoder=True)
    first, number = config.num_hidden_layers, num_mtp_layers(config.to_dict())
    there = set(unexpected)
    layers = [f"layers.{layer}." for layer in range(first, first + number)]
    drafting = tuple(
        layer
        for layer in layers
        if not there.isdisjoint((f"{layer}{JOINED}weight", f"{prefix}{layer}{JOINED}weight"))
    )
    names = sorted(
        name
        for name in there
        if not COMPUTED.search(name)
        and not name.removeprefix(prefix).startswith(drafting)
        and belongs(name)
    )
    if names:
        raise ModelError(
            f"{path}: it leaves out {len(names)} tensors of the checkpoint, {names[0]} first; "
            "they are of two models"
        )


def refuse_not_finite(folder: Path, model: Any) -> None:
    """Raise ModelError if a weight of a loaded model is NaN or infinite."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.itemsize == 1:  # packed
            continue
        if torch.isfinite(weight.sum(dtype=torch.float32)):
            continue  # a sum is one pass and takes no memory
        if not torch.isfinite(weight).all():  # the sum itself may have overflowed
            raise ModelError(
                f"{folder}: the weight {name} holds NaN or infinity in {weight.dtype}; get the "
                "checkpoint again, or use bfloat16 or float32"
            )


def _pattern(name: str) -> str:
    """Return a tensor's name with "#" in place of the numbers of layers and experts."""
    return _NUMBER.sub("#", name)
