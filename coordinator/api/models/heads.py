"""Tells whether a checkpoint is a head, and which hidden states it reads, without loading it.

How a head is recognised: `engine/heads/recognised.py`. Files on the hub are downloaded as the node
would do it; where that fails, the node reports why.
"""

import re
import time
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from coordinator.api.models.folders import (
    SAFETENSORS,
    Checkpoint,
    head_kind_in,
    read_object,
    tensor_bytes,
    text_part,
)
from coordinator.api.prompts import find_file
from proto.errors import ModelError
from proto.head_kinds import (
    JOINED,
    JOINED_ALONE,
    JOINED_APART,
    HeadKind,
    feature_layers,
    is_mtp,
    no_mtp,
    num_mtp_layers,
    reads_last_state,
    refuse_mtp,
)
from proto.system import is_folder

# -- heads -----------------------------------------------------------------------------------------

CONFIG = "config.json"

# For models on the hub: the path of config.json (None: not found), and when it was asked for.
AGAIN_S = 60.0  # pause before the hub is asked again after it did not answer
_fetched: dict[tuple[str, str | None], tuple[Path | None, float]] = {}

Config = Mapping[str, Any]


def kind_of(model: str, revision: str | None) -> HeadKind | None:
    """Return the kind of a head; None: it is a whole model, or its kind cannot be told."""
    if is_mtp(model):
        return HeadKind.MTP
    path = find_config(model, revision)
    try:
        changed_ns = 0 if path is None else path.stat().st_mtime_ns
    except OSError:
        return None
    return None if path is None else _kind_at(path, changed_ns, model, revision)


def is_whole_model(model: str, revision: str | None) -> bool:
    """True if a model is known not to be a head; False if its files cannot be read."""
    return find_config(model, revision) is not None and kind_of(model, revision) is None


def find_config(model: str, revision: str | None) -> Path | None:
    """Return the path of a model's config.json; None: not there, or the hub is not reached."""
    if is_mtp(model):
        return None
    if is_folder(model):
        return find_file(model, revision, CONFIG)
    path, asked_s = _fetched.get((model, revision), (None, -AGAIN_S))
    if path is None and time.monotonic() - asked_s >= AGAIN_S:
        path = find_file(model, revision, CONFIG)
        _fetched[model, revision] = path, time.monotonic()
    return path


@lru_cache(maxsize=64)
def _kind_at(path: Path, _changed_ns: int, model: str, revision: str | None) -> HeadKind | None:
    return head_kind_in(read(path), partial(find_file, model, revision))


def layers_of(
    model: str, revision: str | None, target: str, target_revision: str | None
) -> tuple[int, ...]:
    """Return the layers of the target whose hidden states a head reads; empty: not known.

    The target prepares for these. When the head is loaded it reports its layers, which then count.
    """
    kind = kind_of(model, revision)
    own, theirs = find_config(model, revision), find_config(target, target_revision)
    if kind is HeadKind.MTP:
        return feature_layers(kind, {}, 0)
    if kind is None or own is None or theirs is None:
        return ()
    num_layers = text_part(read(theirs)).get("num_hidden_layers")
    return feature_layers(kind, read(own), num_layers if type(num_layers) is int else 0)


def read(path: Path) -> Config:
    """Return the JSON object in a file; empty if it cannot be read (its node then reports why)."""
    try:
        return read_object(path)
    except ModelError:
        return {}


# -- head fit --------------------------------------------------------------------------------------

# Checks that a head was made for its target, by their config.json and the sizes of its tensors.

_SQUARE = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.linear\.weight")  # [hidden_size, hidden_size]

_FIRST = re.compile(r"(model\.)?(fc|fusion_fc)\.(weight|weight_packed|qweight)")


def check_head(head: Checkpoint, kind: HeadKind | None, target: Checkpoint) -> None:
    """Raise ModelError if `head` is no head, or was made for a target of other sizes.

    Only sizes that the files state are compared.

    kind  the kind of head, as its files say; None: they name no kind
    """
    head.check_head_config(kind, target)
    shapes = head.head_shapes()
    if kind is HeadKind.MEDUSA:
        _check_medusa(head, shapes, target)
    elif shapes and not (reads_last_state(head.stated) or any(map(_FIRST.fullmatch, shapes))):
        raise ModelError(
            f"{head.folder}: it lacks the tensor fc.weight, the first matrix of such a head; get "
            "it again"
        )
    if kind is HeadKind.DFLASH and shapes:
        names = {name.removeprefix("model.") for name in shapes}
        for name in ("hidden_norm.weight", "layers.0.self_attn.q_norm.weight"):
            if name not in names:
                raise ModelError(
                    f"{head.folder}: it lacks the tensor {name} of a DFlash head; get it again"
                )


def check_mtp(target: Checkpoint) -> None:
    """Raise ModelError if a target's checkpoint has no layer for drafting, or none that is read.

    Of a model on the hub whose weights are not here yet, as far as the small files tell.
    """
    refuse_mtp(target.name, target.text_config, is_wrapped=target.is_wrapped)
    names = target.tensor_names()
    numbered = f"layers.{target.number('num_hidden_layers')}.{JOINED}"
    parts = numbered, JOINED_ALONE, JOINED_APART
    if names and not any(part in name for name in names for part in parts):
        raise ModelError(no_mtp(target.name))


def mtp_bytes(target: str, revision: str | None) -> int:
    """Return the size of a target's layers for drafting and of what they share, by the files here.

    0: not known.
    """
    if (config := find_config(target, revision)) is None:
        return 0
    text = text_part(read(config))
    first, number = text.get("num_hidden_layers"), num_mtp_layers(text)
    own = [f"layers.{first + k}." for k in range(number)] if type(first) is int else []
    try:
        files = sorted(config.parent.glob(f"*{SAFETENSORS}"))
        sizes = [item for file in files for item in tensor_bytes(file).items()]
    except ModelError:  # the node says what is wrong
        return 0
    ends = ("embed_tokens.weight", "lm_head.weight")
    return sum(
        size
        for name, size in sizes
        if name.startswith(("mtp.", "model.mtp."))
        or name.endswith(ends)
        or any(one in name for one in own)
    )


def _check_medusa(
    head: Checkpoint, shapes: Mapping[str, tuple[int, ...]], target: Checkpoint
) -> None:
    size = target.number("hidden_size")
    for name, shape in shapes.items():
        if size is not None and _SQUARE.fullmatch(name) and shape != (size, size):
            raise ModelError(
                f"{head.folder}: {name} is {list(shape)}, and the hidden size of {target.name} is "
                f"{size}; use a head made for this target"
            )
