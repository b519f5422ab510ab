"""Tells whether a checkpoint is a head, and of which kind, before anything is loaded.

config.json names the kind, except for EAGLE's first checkpoints, whose config.json is that of a
Llama with one layer: these are recognised by the names of their tensors. No weight is read, and
nothing in a pickle file is executed. Needs no torch, because the coordinator asks too.
"""

import json
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from engine.checkpoint.checkpoint import SMALL, find_folder
from engine.checkpoint.files import read_config
from engine.checkpoint.tensor_list import tensors_in
from engine.errors import ModelError
from engine.heads.stated import INDEX, PICKLED, WHOLE
from proto.head_kinds import HeadKind, is_mtp, kind_of_files

_MAX_PICKLED_BYTES = 1 << 26
# The errors of reading a file that does not have the expected format.
_UNREADABLE = (
    *(ModelError, OSError, ValueError, TypeError, AttributeError, RuntimeError, EOFError),
    *(struct.error, zipfile.BadZipFile),
)

Find = Callable[[str], Path | None]  # function: name of a file -> its path; None: there is none


def kind_in(config: Mapping[str, object], find: Find) -> HeadKind | None:
    """Return the kind of the head in a checkpoint; None: it is a whole model, or nothing tells.

    config  the content of its config.json
    find    finds its other files by their names; called only where config.json does not tell
    """

    def names() -> list[str]:
        found = ((path, read) for name, read in READERS.items() if (path := find(name)) is not None)
        return next((_names_in(path, read) for path, read in found), [])

    return kind_of_files(config, names)


def head_kind_of(name: str, revision: str | None) -> HeadKind | None:
    """Return which head a model in a folder or on the hub is; None: it is a whole model.

    Raises:
        ModelError: as `find_folder` and `read_config`.
    """
    if is_mtp(name):
        return HeadKind.MTP

    def find(file: str) -> Path | None:
        path = find_folder(name, revision, (*SMALL, file)) / file
        return path if path.exists() else None

    return kind_in(read_config(find_folder(name, revision, SMALL)), find)


def _names_in(path: Path, read: Callable[[Path], Iterable[object]]) -> list[str]:
    """Return the names of the tensors in a file; none if it cannot be read: loading says why."""
    try:
        return [name for name in read(path) if isinstance(name, str)]
    except _UNREADABLE:
        return []


def _in_safetensors(path: Path) -> Iterable[object]:
    return [one.name for one in tensors_in(path)]


def _in_index(path: Path) -> Iterable[object]:
    return list(json.loads(path.read_bytes()).get("weight_map", ()))


def _in_pickle(path: Path) -> Iterable[object]:
    """Return all words in a pickle file of PyTorch, the names of its tensors among them."""
    with zipfile.ZipFile(path) as file:
        (name,) = [one for one in file.namelist() if one.endswith("/data.pkl")]
        with file.open(name) as pickled:
            return [word for _, word, _ in pickletools.genops(pickled.read(_MAX_PICKLED_BYTES))]


# The file that lists or holds a head's tensors -> the function that reads their names.
READERS: Mapping[str, Callable[[Path], Iterable[object]]] = {
    INDEX: _in_index,
    WHOLE: _in_safetensors,
    PICKLED: _in_pickle,
}
