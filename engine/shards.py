"""The files of a checkpoint's weights: which they are, whether they are whole, what is in them.

Reads the heads of the files and no number, without torch: also whoever starts a node looks at them,
before it does.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.errors import ModelError, remedy
from engine.model_files import LAYER_COUNTS, Object, parts, read_object, refuse_odd_file

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"

Shapes = Mapping[str, tuple[int, ...]]


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
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(path, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read: {remedy(error)}") from error
    return shapes


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
