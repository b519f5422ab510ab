"""The files of a checkpoint's weights: which they are, whether they are whole, what is in them.

Reads the lists in the files (`tensor_list.py`) and no number, without torch and numpy: also whoever
starts a node looks at them, before it does.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from engine.errors import ModelError
from engine.model_files import LAYER_COUNTS, Object, parts, read_object, refuse_odd_file
from engine.tensor_list import tensors_in

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"

Shapes = Mapping[str, tuple[int, ...]]

# Masks and frequencies that older checkpoints hold and newer models compute.
COMPUTED = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|(inv_freq|position_ids)$")
_PLAIN_TYPES = ("F32", "BF16", "F16", "F64")
_WHOLE_TYPES = ("I16", "I32", "I64")


def read_shapes(folder: Path) -> Shapes:
    """Return the shape of every tensor of a checkpoint, by name.

    Raises:
        ModelError: a file of it is missing, or torn, or is not what its name says.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        shapes |= shapes_in(path)
    return shapes


def shapes_in(path: Path) -> Shapes:
    """Return the shape of every tensor in a file, by name.

    Raises:
        ModelError: the file is missing, or torn, or is not what its name says.
    """
    refuse_odd_file(path)
    return {one.name: one.shape for one in tensors_in(path)}


def refuse_odd_weights(folder: Path, *, is_packed: bool) -> None:
    """As `refuse_odd_types`, of all files of a model. Raises ModelError."""
    for path in weight_files(folder):
        refuse_odd_types(path, is_packed=is_packed)


def refuse_odd_types(path: Path, *, is_packed: bool = False, whole: Collection[str] = ()) -> None:
    """Raise ModelError if a weight, bias or norm in a file is of a type that none can have.

    is_packed  the model's matrices are: then only norms and biases have to be plain
    whole      the ends of tensors' names that must be whole numbers
    """
    wanted: tuple[str, ...]
    for one in tensors_in(path):
        name, kind = one.name, one.kind
        is_plain_one = name.endswith((".weight", ".bias")) and not COMPUTED.search(name)
        if name.endswith(tuple(whole)):
            wanted, words = _WHOLE_TYPES, "whole numbers (int64, int32 or int16)"
        elif is_plain_one and (len(one.shape) < 2 or not is_packed):
            wanted, words = _PLAIN_TYPES, "float32, bfloat16 or float16"
        else:
            continue
        if kind not in wanted:
            raise ModelError(
                f"{path}: {name} holds numbers of type {kind}, and they must be {words}; get the "
                "checkpoint again, or one with plain weights"
            )


def check_layers(path: Path, stated: Object, shapes: Shapes) -> None:
    """Raise ModelError if there are more layers than tensors: to lay those out takes for ever."""
    for part in parts(stated):
        for field in LAYER_COUNTS:
            count = part.get(field) or 0
            if count > len(shapes):
                raise ModelError(
                    f"{path}: {field} is {count}, but the checkpoint has {len(shapes)} tensors; "
                    "config.json is of another model"
                )


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads: one, or those that the index names.

    Raises:
        ModelError: there is none, or the index names what is not there.
    """
    whole, index = folder / _WHOLE, folder / _INDEX
    if whole.exists() or whole.is_symlink():
        return [whole]
    if not (index.exists() or index.is_symlink()):
        raise ModelError(f"{folder}: it has neither {_WHOLE} nor {_INDEX}; name its weights so")
    content = read_object(index)
    named = content.get("weight_map")
    if not isinstance(named, dict) or not named or not all(map(_is_name, named.values())):
        raise ModelError(f"{index}: weight_map must name a file for each tensor; get it again")
    if not isinstance(content.get("metadata"), dict):
        raise ModelError(f"{index}: metadata must be an object, if an empty one; get it again")
    files = [folder / name for name in sorted(set(named.values()))]
    for path in files:
        if not path.exists():
            raise ModelError(f"{index}: it names {path.name}, which is not there; get it again")
    return files


def _is_name(value: object) -> bool:
    """Whether this is the name of a file in the folder itself."""
    return isinstance(value, str) and value.endswith(".safetensors") and Path(value).name == value
